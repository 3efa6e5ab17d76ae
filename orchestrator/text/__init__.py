"""Text for people: numbers with units, output streams that accept any text, and paths and commands for messages."""
