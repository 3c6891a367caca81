"""NUMA binding: local ranks run on the cores beside their GPU."""
