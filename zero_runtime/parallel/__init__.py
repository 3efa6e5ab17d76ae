"""Axes beside that of the data: tensor (slices of layers) and sequence (parts of sequences)."""
