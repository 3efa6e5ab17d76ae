"""Forwards without gradients: inference, and generation of unequal lengths on ranks that shard parameters."""
