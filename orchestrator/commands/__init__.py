"""The commands of the command line, one file each, and the helpers that they share."""
