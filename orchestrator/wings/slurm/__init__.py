"""Runs points as SLURM jobs."""
