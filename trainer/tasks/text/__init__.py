"""Texts of tasks: columns, windows, words, spans and packing."""
