"""Schedule-free AdamW."""
