"""Draws pictures of plain numbers: shapes, their text as SVG, and their pixels as PNG. Knows nothing of runs."""
