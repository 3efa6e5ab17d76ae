"""What the terminal and report.md show, from records alone."""
