"""Calibration of classes: the calibration error of probabilities, the Brier score, and the best thresholds."""
