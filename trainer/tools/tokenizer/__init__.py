"""`trainer tokenizer`: a tokenizer for a family of models, trained on texts."""
