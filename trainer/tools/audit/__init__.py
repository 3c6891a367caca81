"""`trainer audit`: rows of a recipe's data, or of a run, that are likely wrong, repeated or of no use."""
