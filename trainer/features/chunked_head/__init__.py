"""The loss over a vocabulary in blocks, so that logits are never held whole."""
