"""Starts the ranks of a point on this machine, watches them, and runs the points of a sweep."""
