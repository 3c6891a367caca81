"""Ranks that `accelerate launch` starts, and its flags."""
