"""Draws pictures of plain numbers with matplotlib, as SVG and as PNG. Knows nothing of runs."""
