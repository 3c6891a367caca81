"""Columns of the task, made from those of the source: `data.map` and `data.maps`."""
