"""Points as jobs of SLURM."""
