"""Optimizers: their updates under every layout, and their states."""
