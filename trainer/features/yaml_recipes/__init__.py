"""Recipes in YAML 1.2."""
