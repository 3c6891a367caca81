"""The parts of whole tensors that ranks hold: their elements, gathering, digests, and rounding."""
