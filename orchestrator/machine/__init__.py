"""This computer: its hardware, the slots that runs occupy, and the processes that we start on it."""
