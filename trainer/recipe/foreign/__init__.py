"""Keys of other tools: one table for each tool, in its own spelling and with its defaults.

The readers are suggestions for unknown keys (`spellings.py`), `trainer convert` and the documentation.
"""
