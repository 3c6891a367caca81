"""Stages: trainings of one recipe, each from the model of another one: the key `stages`."""
