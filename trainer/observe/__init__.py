"""Output of a run: terminal and files; features add others.

Observers use only the records in `records.py`, no model, engine or process group.
"""
