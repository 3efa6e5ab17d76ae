"""Files on disk and nothing else: what a run and a sweep record, and how records are read back."""
