"""What runs on the ranks: the training step, its measuring, and faults put in on purpose."""
