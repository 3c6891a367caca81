"""Context parallelism: ranks share the positions of each row; attention exchanges heads, and goes around a ring."""
