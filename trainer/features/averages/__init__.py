"""Exponential moving averages of the weights."""
