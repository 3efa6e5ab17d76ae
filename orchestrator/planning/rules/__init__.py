"""The rules between the groups of a configuration, and between a configuration and the machine."""
