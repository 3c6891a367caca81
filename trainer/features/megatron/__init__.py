"""Indexed data sets of Megatron."""
