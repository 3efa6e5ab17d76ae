"""From one command line to checked points, each run as a job of real processes, and a report of the numbers."""
