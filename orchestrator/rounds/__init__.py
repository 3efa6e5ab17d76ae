"""Measuring in rounds: whose turn it is, what a round records, and which differences between points it shows. Pure."""
