"""Hugging Face models: loading, cutting and the functions that they compute with.

Knows no task and no data.
"""
