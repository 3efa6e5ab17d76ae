"""Profiles one forward by module: parameters, operations and time, as a table for the section flops_profiler."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from zero_runtime.profile.flops import FlopsByModule
from zero_runtime.profile.ranges import ROOT, StepRanges
from zero_runtime.runtime import ZeroRuntime

_NUMBERS = ("params", "FLOPs", "microseconds")


class _Ranges(StepRanges):
    """Times that a GPU has finished."""

    @staticmethod
    def now() -> float:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter()


@contextmanager
def profile_forward(runtime: ZeroRuntime, section: Mapping[str, Any], title: str) -> Iterator[None]:
    """Context around one forward in the phase "forward" of a running clock; then prints the table, or writes it.

    Nothing is sent, so that one rank may do it alone.
    """
    ranges = _Ranges(runtime.model, runtime.clock)
    flops = FlopsByModule(ranges)
    with ranges, flops:
        yield
    counted = {name: one.forward for name, one in flops.by_module.items() if name is not None}
    text = "\n".join([title, *_lines(runtime, counted, ranges.seconds, section)])
    file = section.get("output_file")
    if file:
        Path(file).parent.mkdir(parents=True, exist_ok=True)
    with Path(file).open("w", encoding="utf-8") if file else nullcontext() as out:
        print(text, file=out, flush=True)


def _lines(
    runtime: ZeroRuntime, flops: Mapping[str, int], seconds: Mapping[str, float], section: Mapping[str, Any]
) -> Iterator[str]:
    """One line for each module down to module_depth, with the modules in it, where a multiplication and an addition are
    two operations; then the classes with the most of each number at each depth."""
    numels = {name: math.prod(shape) for unit in runtime.units for name, shape in unit.full_shapes.items()}
    limit, most = section.get("module_depth", -1), defaultdict[tuple[int, str], Counter[str]](Counter)
    yield f"{'module':<32} {'class':<24}" + "".join(f"{title:>20}" for title in (*_NUMBERS, "MACs", "FLOPS"))
    for path, module in runtime.model.named_modules():
        depth, kind = path.count(".") + bool(path), type(module).__name__
        if depth > limit >= 0:
            continue
        params, made = (
            sum(number for name, number in numbers.items() if not path or f"{name}.".startswith(f"{path}."))
            for numbers in (numels, flops)
        )
        numbers = (params, made, us := round(1e6 * seconds[path or ROOT]))
        for what, number in zip(_NUMBERS, numbers, strict=True):
            most[depth, what][kind] += number
        if depth == 0 or section.get("detailed", True):
            columns = (*numbers, made // 2, 10**6 * made // us if us else 0)
            label = "  " * depth + (path.rpartition(".")[2] or ROOT)
            yield f"{label:<32} {kind:<24}" + "".join(f"{number:>20,}" for number in columns)
    for (depth, what), sums in most.items():
        top = [f"{kind} {number:,}" for kind, number in sums.most_common(section.get("top_modules", 1)) if number]
        yield f"most {what} at depth {depth}: {', '.join(top)}"
