"""What becomes of each point before anything starts: rules, predicted memory, run, keep, leave out or refuse."""
