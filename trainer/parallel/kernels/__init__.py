"""Triton kernels of attention and dropout, their blocks, and the devices that run them."""
