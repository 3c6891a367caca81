"""What the user wrote: the schema, its loading, the table of strategies and the arithmetic that follows.

Imports no torch, so that `trainer check` answers at once.
"""
