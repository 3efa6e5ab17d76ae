"""`search`: Optuna proposes points, and each of them is measured as a row of one sweep."""
