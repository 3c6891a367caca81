"""Mixtures of experts: their families, one arithmetic for their products, and experts divided over ranks."""
