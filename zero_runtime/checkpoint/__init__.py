"""Sharded checkpoints: written by all ranks in parallel, committed atomically, loaded under any plan and world size."""
