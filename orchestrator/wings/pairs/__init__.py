"""A wing: prompts and responses of a JSON file as windows of tokens, for data=pairs."""
