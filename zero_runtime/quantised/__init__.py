"""Messages as codes of 8 or 4 bits: see [Note: quantised collectives] in wire.py."""
