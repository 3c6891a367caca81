"""`trainer compare`: layouts or recipes side by side on this machine, in turns."""
