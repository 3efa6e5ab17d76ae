"""A wing: the loss over held-out data, during a training and alone (measure=eval)."""
