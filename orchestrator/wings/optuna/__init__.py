"""Lets Hydra sweepers such as Optuna measure the points that they propose."""
