"""Token classification: tags of words, such as parts of speech, and named entities in texts."""
