"""MLflow: what is logged of a run, by a process of its own that follows the run's records."""
