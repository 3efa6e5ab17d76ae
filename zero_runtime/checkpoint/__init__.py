"""Sharded checkpoints: written by all ranks in parallel, committed at once, loaded at any plan and world."""
