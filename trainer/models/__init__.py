"""Hugging Face models: loading, cutting and the functions that they compute with.

The package does not depend on tasks or data.
"""
