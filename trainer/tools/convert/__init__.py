"""`trainer convert`: other tools' files to a recipe, with a report on each key.

`foreign/` lists the other tools' keys. This package converts their values.
"""
