"""The precision fp16: dynamic loss scaling, and products with gradients of weights in fp32."""
