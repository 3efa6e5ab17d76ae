"""A wing: what a saved model has besides its weights: tokenizer and chat template, companion files, adapters."""
