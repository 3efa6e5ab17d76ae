"""The rules between the groups of a configuration, and between it and the machine."""
