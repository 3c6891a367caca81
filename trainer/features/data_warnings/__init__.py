"""Warnings on training data: classes that look alike or lack rows, rows that repeat, and answers without an end."""
