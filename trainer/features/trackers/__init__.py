"""Logging to TensorBoard and to tracking services: Weights & Biases, MLflow and Trackio."""
