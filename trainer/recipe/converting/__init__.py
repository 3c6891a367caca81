"""`trainer convert`: other tools' files to a recipe and a report of what became of each key.

What a key is called here stands in `recipe/foreign/`; these modules know what its values mean here.
"""
