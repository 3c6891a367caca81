"""Masked language modelling, as in the pretraining of BERT."""
