"""Schedules of the learning rate with restarts, a power, or an inverse square root."""
