"""A rank's own error in one line: what, where in the step, and for a lack of memory how much was wanted."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from zero_runtime.errors import RankError, RankMemoryError
from zero_runtime.watch.journal import RankPosition

_WANTED = re.compile(r"[Tt]ried to allocate ([\d.]+ ?\w*)")  # both of torch's allocators say it so


def told(error: BaseException, place: RankPosition) -> str:
    """The error and where it was; of a lack of memory the bytes wanted and what helps."""
    at = f"in {place.phase} of step {place.step}" + (f", unit {place.unit}" if place.unit else "")
    text = f"{type(error).__name__}: {error}"
    if not is_out_of_memory(error):
        return f"{text} ({at})"
    size = wanted_size(error)
    wanted = f"wanted {size}" if size else "it is not told how much was wanted"
    return f"out of memory {at}: {wanted} ({text.splitlines()[0]})"


def wanted_size(error: BaseException) -> str | None:
    """How much was asked of the allocator, in its own words ("2.00 GiB"); None where it does not say."""
    found = _WANTED.search(str(error))
    return found[1].strip() if found else None


def memory_error(
    rank: int, error: BaseException, place: RankPosition, held: Mapping[str, int] | None = None
) -> RankMemoryError:
    """What the rank raises in place of its allocator's error. `held`: bytes by component at that moment."""
    facts: dict[str, object] = {
        "held": dict(held or {}),
        "phase": place.phase,
        "step": place.step,
        "unit": place.unit,
        "wanted": wanted_size(error),
    }
    on_host = torch.cuda.is_initialized() and not isinstance(error, torch.OutOfMemoryError)
    return RankMemoryError(f"rank {rank}: {told(error, place)}", rank, facts, on_host=on_host)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this rank, not one that the error quotes, could not get memory."""
    if isinstance(error, RankError):
        return False
    # The allocator of the CPU raises a plain RuntimeError.
    is_plain = isinstance(error, RuntimeError) and "allocate memory" in str(error)
    return is_plain or isinstance(error, (MemoryError, torch.OutOfMemoryError))
