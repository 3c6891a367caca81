"""Multiple choice: the text that fits a context, as in SWAG, RACE and COPA."""
