"""A wing: predicts the bytes and the time of a step before anything runs. What trains imports nothing of it."""
