"""Reads checkpoints of other libraries into a runtime's shards."""
