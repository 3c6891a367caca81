"""What a run tells the outside world: the terminal, files, TensorBoard, tracking services.

This room knows only the records in `records.py`; it never sees a model, an engine or a process group.
"""
