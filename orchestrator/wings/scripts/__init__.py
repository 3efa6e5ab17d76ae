"""Runs a user's own scripts on ranks of this machine, as DeepSpeed's launcher and torchrun do."""
