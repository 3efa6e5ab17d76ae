"""Builds the text of the terminal and of report.md from records alone."""
