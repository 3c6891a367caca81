"""Plans: memory, communication and arithmetic of a recipe's training step, on any number of ranks, without a GPU."""
