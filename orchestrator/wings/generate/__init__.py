"""A wing: greedy text from sharded weights; the verb generate, and the examples at the end of a training."""
