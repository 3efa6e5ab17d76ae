"""MLflow tracking: logs runs from a separate process that follows the runs' records."""
