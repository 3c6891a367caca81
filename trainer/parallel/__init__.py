"""Process groups, meshes, placement, random numbers and norms. Knows no recipe and no Hugging Face class."""
