"""Engines: what turns one global batch into one optimizer step, whatever the layout."""
