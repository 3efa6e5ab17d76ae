"""The batch sizes of a step: train_batch_size = micro-batch x accumulation x ranks. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from zero_runtime.deepspeed.schema import Reader

TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@dataclass(frozen=True)
class BatchSizes:
    """Samples per step over all ranks, samples per micro-batch on one rank, micro-batches per step."""

    train: int = 1
    micro: int = 1
    accumulation: int = 1


def read_batch(values: Mapping[str, Any], world: int, reader: Reader) -> BatchSizes:
    """Compute all three sizes from those that are given; accumulation is 1 unless it follows from the others.

    Sizes that contradict each other are a problem that shows the numbers and the nearest valid ones.
    """
    given = {name: values[name] for name in (TRAIN, MICRO, STEPS) if name in values}
    low = [f"{name}: expected at least 1, found {value}" for name, value in given.items() if value < 1]
    if low:
        reader.problems += low
        return BatchSizes()
    train, micro, steps = (given.get(name) for name in (TRAIN, MICRO, STEPS))
    if reader.refused & {TRAIN, MICRO}:  # a value that could not be read is the only problem
        return BatchSizes()
    if train is None and micro is None:
        reader.problems.append(f"{TRAIN}: expected it or {MICRO}, found neither; set one of them")
        return BatchSizes()
    if train is None:
        return BatchSizes((micro or 1) * (steps or 1) * world, micro or 1, steps or 1)
    if micro is not None and steps is not None:
        if micro * steps * world != train:
            reader.problems.append(
                f"{TRAIN}: expected {micro} ({MICRO}) x {steps} ({STEPS}) x {world} (ranks) = {micro * steps * world}, "
                f"found {train}; set {TRAIN} to {micro * steps * world}, or leave one of the three out"
            )
        return BatchSizes(train, micro, steps)
    if micro is None:
        steps = steps or 1
        return BatchSizes(train, _share(train, steps * world, f"{steps} ({STEPS}) x {world} (ranks)", reader), steps)
    return BatchSizes(train, micro, _share(train, micro * world, f"{micro} ({MICRO}) x {world} (ranks)", reader))


def _share(train: int, parts: int, product: str, reader: Reader) -> int:
    if train % parts:
        below = train // parts * parts
        near = f"{below} or {below + parts}" if below else f"{parts}"
        reader.problems.append(f"{TRAIN}: expected a multiple of {product} = {parts}, found {train}; set it to {near}")
    return max(train // parts, 1)
