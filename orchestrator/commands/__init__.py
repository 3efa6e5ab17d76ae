"""One file for each command, and what they share."""
