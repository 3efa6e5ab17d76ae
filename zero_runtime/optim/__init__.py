"""Optimizers over sharded states: configurations, update rules, loss scale and learning rates."""
