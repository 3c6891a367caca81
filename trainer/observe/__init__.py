"""Output of a run: terminal, files, TensorBoard and tracking services.

Observers use only the records in `records.py`, no model, engine or process group.
"""
