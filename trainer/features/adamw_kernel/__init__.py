"""AdamW in one Triton kernel, which also clips gradients and rounds the weights of the next step to 16 bits."""
