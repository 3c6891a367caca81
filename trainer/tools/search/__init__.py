"""`trainer search`: which values of a recipe's keys are better, by Optuna; every trial draws the same rows."""
