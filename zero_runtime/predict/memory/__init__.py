"""Memory use in bytes: predicted by formula, counted on live tensors, and traced for activations."""
