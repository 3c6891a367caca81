"""Streams: training splits that are read window by window, from the middle and in a deterministic order."""
