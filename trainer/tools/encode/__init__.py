"""`trainer encode`: the texts of a recipe as files of token ids, written once on many processes."""
