"""`trainer doctor`: checks of this machine, each with its remedy.

Each check is one function that returns one `Finding`; `table.py` lists them. Questions that need torch, deepspeed or a
GPU run in a process of their own (`probe.py`), because they can hang or crash. A check imports the other packages that
it needs, so that a missing package is a finding too. The package changes nothing on the machine.
"""
