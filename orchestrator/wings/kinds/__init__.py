"""A wing: the kinds of models: what a config.json describes, what a batch of it holds, and which data it reads."""
