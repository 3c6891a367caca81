"""`trainer reproduce`: a recipe with several seeds, beside the metrics that it expects."""
