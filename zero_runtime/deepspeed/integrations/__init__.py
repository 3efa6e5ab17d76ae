"""Integrations with other libraries, each in a file of its own that is imported only where a script names it."""
