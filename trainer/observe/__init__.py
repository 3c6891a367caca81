"""Output of a run: terminal, files, TensorBoard and tracking services.

Knows only the records in `records.py`: no model, no engine, no process group.
"""
