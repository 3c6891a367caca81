"""Hugging Face models: building them, and the dropout and attention functions that they compute with.

Blind to tasks and data: what a task needs of a model arrives as options of its configuration.
"""
