"""Code that runs on the ranks: the training loop, its measurements, and injected faults."""
