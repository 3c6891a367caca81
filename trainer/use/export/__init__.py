"""`trainer export`: from a checkpoint to a Hugging Face folder, merged or as an adapter of PEFT."""
