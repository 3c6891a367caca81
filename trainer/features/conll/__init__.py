"""CoNLL files: a word and its tag on each line."""
