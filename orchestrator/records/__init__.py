"""The records of runs and sweeps: files on disk, how they are written, and how they are read back."""
