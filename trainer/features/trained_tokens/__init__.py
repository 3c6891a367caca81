"""Rows of tokens to train in a frozen embedding and its head, beside an adapter."""
