"""Weights in bf16 without fp32 masters: updates with compensated or stochastic rounding."""
