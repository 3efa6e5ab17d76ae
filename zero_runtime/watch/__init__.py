"""Ranks that watch each other, so that a hang or a death is named in seconds."""
