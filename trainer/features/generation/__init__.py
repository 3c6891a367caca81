"""Generation of texts, for metrics on texts and for `trainer predict` with language models."""
