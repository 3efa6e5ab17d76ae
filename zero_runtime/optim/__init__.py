"""Optimizers over sharded states: their constants, update rules, loss scale and learning rates."""
