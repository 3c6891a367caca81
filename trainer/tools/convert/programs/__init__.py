"""Programs around the Trainer of transformers: the keys beyond TrainingArguments."""
