"""Casts to 16 bits that several products share: of an input, and of the weights for all passes of a step."""
