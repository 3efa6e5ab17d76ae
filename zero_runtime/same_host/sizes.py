"""The memory of sums of tensors that ranks read from each other, for those who make them and who predict them. Pure."""

from __future__ import annotations

CHUNK = 2**19  # bytes that are summed at a time: what was copied is still in the core's own cache


def terms_bytes(nbytes: int) -> int:
    """The most bytes of the other ranks' terms that a rank holds while it sums tensors of `nbytes`: two chunks."""
    return 2 * min(CHUNK, nbytes)
