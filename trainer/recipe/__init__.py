"""The schema of a recipe, the tables of strategies and schedules, and the batch arithmetic.

Imports no torch, so that `trainer check` answers at once.
"""
