"""From files and overrides to a recipe: parsing, merging, rules, errors and suggestions."""
