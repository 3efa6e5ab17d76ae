"""Text for people: numbers with units, streams that take any text, paths and commands as they are shown."""
