"""Runs that nodes join and leave under torchrun: the key `parallel.elastic`."""
