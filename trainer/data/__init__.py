"""From data sources to batches: loading, tokenising, caching, order. Knows no task and no model."""
