"""Checkpoints of other libraries, read onto shards."""
