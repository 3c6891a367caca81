"""Optional parts of a training, each a folder that can be deleted. The floors below import none of them."""
