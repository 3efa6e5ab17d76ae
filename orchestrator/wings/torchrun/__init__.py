"""Takes part in a run whose ranks torchrun, srun or a person has started."""
