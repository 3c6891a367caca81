"""Triton kernels of attention and dropout, which draw layout-invariant masks, and their blocks."""
