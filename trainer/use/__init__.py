"""The use of a trained model: evaluation and export."""
