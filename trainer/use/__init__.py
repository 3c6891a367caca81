"""The use of a trained model: evaluation, prediction and export."""
