"""The keys of tensor and of sequence parallelism: into how many parts layers and sequences are divided."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from zero_runtime.deepspeed.partition_section import WHERE, Specs, read_specs
from zero_runtime.deepspeed.schema import Reader

SEQUENCE, DATA = "sequence_parallel_size", "data_parallel_size"


class Degrees(NamedTuple):
    """Consecutive ranks that hold the slices of one model, and those that hold the parts of the same sequences.

    tensor_key: the key that says the first. specs: of the layers that are divided.
    """

    tensor: int = 1
    sequence: int = 1
    tensor_key: str = "tensor_parallel"
    specs: Specs = ()


UNDIVIDED = Degrees()


def read_degrees(values: Mapping[str, Any], world: int, reader: Reader, *, engine: bool) -> Degrees:
    """The degrees of a configuration for `world` ranks; those that do not divide them are problems.

    engine: for the engine, which divides no sequences: such a degree above 1 is a problem.
    """
    section = values.get("tensor_parallel", {})
    tensor, key = _tensor(section, reader)
    specs = read_specs(section.get("partition_config", {}), reader)
    if specs and not engine:
        reader.refuse(WHERE, "its layers are known with the script's model; name them in parallel.patterns")
    sequence, data = values.get(SEQUENCE, 1), values.get(DATA)
    for name, degree in ((key, tensor), (SEQUENCE, sequence)):
        if degree < 1:
            reader.refuse(name, f"expected at least 1, found {degree}")
        elif world % degree and not (engine and name == SEQUENCE):
            nearest = max(one for one in range(1, world + 1) if world % one == 0 and one < degree)
            reader.refuse(name, f"expected a divisor of the {world} ranks, found {degree}; the nearest is {nearest}")
    if engine and sequence > 1:
        reader.refuse(
            SEQUENCE,
            f"found {sequence}: sequence parallelism is on the command line alone (parallel.sp={sequence}), where "
            "`zlab import` puts it: a script gives the model its part of a sequence, and here the model takes its part "
            "of whole ones; set it to 1, and use smaller micro-batches or recomputation",
        )
    elif tensor > 1 and sequence > 1:
        reader.refuse(SEQUENCE, f"expected 1 beside {key}={tensor}, found {sequence}: both divide the heads; keep one")
    if data is not None and data * sequence != world:
        reader.refuse(DATA, f"expected {world} ranks / {sequence} ({SEQUENCE}), found {data}; leave it out")
    return Degrees(tensor, sequence, key, specs) if not reader.refused & {key, SEQUENCE, DATA} else UNDIVIDED


def _tensor(section: Mapping[str, Any], reader: Reader) -> tuple[int, str]:
    """The degree of tensor parallelism, and the path of the key that says it."""
    inner = section.get("tp", {})
    given = {name: section[name] for name in ("tp_size", "autotp_size") if name in section}
    given |= {"tp.tp_size": inner["tp_size"]} if "tp_size" in inner else {}
    if {"tp_size", "autotp_size"} <= given.keys():
        reader.problems.append(
            "tensor_parallel: tp_size and autotp_size are two names of one number, found both; keep one"
        )
    if not given or not section.get("enabled", True):
        return 1, "tensor_parallel"
    if len(sizes := {size for size in given.values() if size > 1}) > 1:
        reader.problems.append(f"tensor_parallel: expected one size, found {sorted(sizes)}; keep autotp_size")
    largest = max(given, key=given.__getitem__)
    return given[largest] or 1, f"tensor_parallel.{largest}"  # an autotp_size of 0 switches it off


def batch_ranks(config: Mapping[str, Any], ranks: int) -> int:
    """The ranks that DeepSpeed counts in train_batch_size: those with other sequences, and with tensor parallelism all,
    although the ranks of a group read the same ones."""
    degree = config.get(SEQUENCE)
    divides = isinstance(degree, int) and degree > 0 and ranks % degree == 0
    return ranks // int(degree or 1) if divides else ranks


def notes_of(degrees: Degrees) -> list[str]:
    """Sentences for the user."""
    if degrees.tensor == 1:
        return []
    return [
        f"{degrees.tensor_key}: the {degrees.tensor} ranks of a group read the same sequences, and DeepSpeed's "
        f"train_batch_size counts each of them; a step here has train_batch_size / {degrees.tensor} sequences"
    ]
