"""`trainer doctor`: is this machine fit to train, and if not, what has to be done.

Each check is one function that says what it looks at and returns one `Finding`; `table.py` lists them. What needs
torch, deepspeed or a GPU is asked in a process of its own (`probe.py`), which may hang or crash without taking the
answer with it. Other packages are imported by the checks that need them, so that one that is missing is a line like any
other. The room changes nothing on the machine.
"""
