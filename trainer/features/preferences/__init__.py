"""Learning from preferences: DPO and similar losses, KTO, and reward models."""
