"""What other tools call our keys: one table for each tool, in that tool's own spelling and with its defaults.

The tables answer a recipe that was written from habit (`spellings.py`), `trainer convert`, and the documentation.
"""
