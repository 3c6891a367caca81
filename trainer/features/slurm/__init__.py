"""Ranks that Slurm's srun starts."""
