"""Hidden states between the layers of a model in bf16."""
