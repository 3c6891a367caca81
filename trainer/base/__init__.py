"""Errors, durable files and small helpers; every other package may use them."""
