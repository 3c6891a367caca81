"""`trainer`: one JSON recipe, any layout, the same training.

Importing this package imports nothing heavy: the command line answers without torch (see `docs/`).
"""

__version__ = "0.1.0"
