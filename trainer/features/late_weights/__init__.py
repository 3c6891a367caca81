"""Gradients of weights behind the messages of tensor ranks."""
