"""Smaller global batches at the start of a training: the key `training.batch_size_warmup`."""
