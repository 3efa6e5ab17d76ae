"""This computer: what it has, who uses it, and how processes of ours start on it."""
