"""Texts of tasks: columns, windows, words, spans, packing and masking."""
