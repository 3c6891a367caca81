"""Excel files, and the key `data.sheet`."""
