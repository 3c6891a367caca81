"""Frozen weights beneath adapters in 4 or 8 bits, by bitsandbytes: QLoRA."""
