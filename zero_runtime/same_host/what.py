"""The operations by name, and the dtypes by number, as tokens have them."""

from __future__ import annotations

import torch

MESSAGE = 0
NAMES = (
    *(
        "message",
        "all_gather",
        "reduce_scatter",
        "all_reduce",
        "all_to_all",
        "broadcast",
        "reduce",
        "gather",
        "scatter",
    ),
    "barrier",
)
_DTYPES = sorted((one for one in vars(torch).values() if isinstance(one, torch.dtype)), key=str)
_NUMBERS = {dtype: number for number, dtype in reversed(list(enumerate(_DTYPES)))}  # torch.float is torch.float32


def number_of(dtype: torch.dtype) -> int:
    """A number for the dtype, the same in all processes with one build of torch."""
    return _NUMBERS[dtype]


def told(what: int, numel: int, dtype: int) -> str:
    """An operation as an error names it."""
    return f"{NAMES[what]} of {numel} {str(_DTYPES[dtype]).removeprefix('torch.')}"
