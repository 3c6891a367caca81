"""`trainer suite`: a list of recipes over one model, with several seeds and a mean."""
