"""Keys of other tools: one table for each tool, in its own spelling and with its defaults.

Three readers use the tables: suggestions for unknown keys (`spellings.py`), `trainer convert` and the documentation.
"""
