"""Knowledge distillation: a frozen teacher beside the labels."""
