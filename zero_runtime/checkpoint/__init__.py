"""Sharded checkpoints that load at any stage, world and precision. The format is described in docs/checkpoints.md."""
