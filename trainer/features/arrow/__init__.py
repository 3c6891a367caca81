"""Arrow files, also those of `datasets.save_to_disk`."""
