"""Plans a sweep before anything starts: checks the rules, predicts memory, and decides which points to run."""
