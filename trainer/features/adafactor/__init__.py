"""The optimizer Adafactor."""
