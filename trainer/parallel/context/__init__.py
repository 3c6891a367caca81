"""Context parallelism: attention around a ring of ranks that share each sequence."""
