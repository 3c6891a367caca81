"""ZeRO by DeepSpeed: the strategies zero1, zero2 and zero3."""
