"""The loss over a vocabulary and its gradient in the memory of the logits, without copies in fp32."""
