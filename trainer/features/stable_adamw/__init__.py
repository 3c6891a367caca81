"""The optimizer StableAdamW."""
