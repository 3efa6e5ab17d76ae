"""Work that needs the models, in a child process of the command line, so that the command itself needs no torch.

Reads {"units": {key: configuration}, "activations": [{key: configuration}, ...]} as JSON from stdin; the configurations
in one dictionary of activations differ only in the micro-batch. Writes [key, answer] as one line of JSON to stdout as
each answer is ready. The answer is from `units_of` or from activations.py, the problem of a model that cannot be built,
or what else failed, which is "passing".

[Note: forked counting]
Families of activations share nothing but the model, so that forks of this process count them, as many as there are
cores and at most MOST. The model is built before, for all of them. Numbers of families wait in a pipe, from which each
process takes the next one; the numbers of those that it has answered go into another pipe. Families that a process left
unanswered when it died are counted again, one at a time, each in a fork of its own; one that dies again is told with
the last words of its process.

[Note: threads after a fork]
The first call of torch.set_num_threads makes a pool of threads, which a fork cannot use: in a fork, the next such call
replaces the pool. The threads of autograd's devices, one for each, all make that call when they start, and two at once
end the process ("Invalid thread pool!"). So each fork makes it before it has any other thread, and this process, which
computes nothing, never makes it.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import IO, Any, TextIO

import torch

from orchestrator.config.schema import RunConfig, from_dict
from orchestrator.machine.processes import die_with_parent, how_it_ended
from orchestrator.wings.predict.activations import answers, built, shorten_once
from orchestrator.wings.predict.sliced import messages_of
from orchestrator.worker.setup import unit_rules
from zero_runtime.errors import brief
from zero_runtime.offload_plan import offloaded_units
from zero_runtime.unit_planner import plan_units

MOST = 4  # processes that count; each takes some hundred MiB
_NUMBER = struct.Struct("=H")


def units_of(config: RunConfig) -> dict[str, Any]:
    """Shapes by unit in the order of registration, the bytes of optimizer state per element, the number of elements per
    block of that state, the bytes of the model's buffers, the messages of tensor parallelism, and the full shapes of
    what it divides.

    The shapes are those of a rank's slices; the number of elements (`numel`) is that of the full parameters.
    """
    model = built(config)
    specs = plan_units(model, unit_rules(config, model))
    optimizer = config.optimizer.rule
    return {
        "units": [
            {
                "name": spec.name,
                "shapes": [[name, list(shape)] for name, shape in spec.shapes],
                "numel": spec.numel,
                "trainable": spec.trainable,
                "matrices": spec.matrices,
                "is_root": model in spec.modules,
                "precision": asdict(spec.precision),
                "offloaded": offloaded,
            }
            for spec, offloaded in zip(specs, offloaded_units(specs, config.offload.ratio), strict=True)
        ],
        "state_bytes": optimizer.state_bytes,
        "block_numel": optimizer.block_numel,
        "buffer_bytes": sum(buffer.nbytes for buffer in model.buffers()),
        "tensor": messages_of(config, model).plain(),
        "full_shapes": {name: split.shape for spec in specs for name, split in spec.slices.splits.items()},
    }


def _answer(config: RunConfig) -> dict[str, Any]:
    try:
        return units_of(config)
    except ValueError as error:  # the user's mistake, as every builder promises; a job would report the same
        return {"problem": "; ".join(str(error).splitlines())}
    except Exception as error:  # the other answers are still needed; it may be this machine's memory, so it passes
        return {"unknown": brief(error), "passing": True}


class _Answers:
    """Writes answers as lines. Processes that share one write one line at a time."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._lock = tempfile.TemporaryFile()  # noqa: SIM115  its lock belongs to a process, and ends with it

    def tell(self, key: str, answer: Any) -> None:
        line = json.dumps([key, answer])
        fcntl.lockf(self._lock, fcntl.LOCK_EX)
        try:
            self._out.write(f"\n{line}\n")  # the first ends what a process wrote that died in the middle of a line
            self._out.flush()
        finally:
            fcntl.lockf(self._lock, fcntl.LOCK_UN)


def _answer_family(family: Mapping[str, Any], to: _Answers) -> None:
    for key, answer in answers([from_dict(one) for one in family.values()]):
        to.tell(key, answer)


def _answer_families(families: Sequence[Mapping[str, Any]], to: _Answers, processes: int) -> None:
    """Answers each family, in forks of this process: see [Note: forked counting]."""
    if not families:
        return
    shorten_once(from_dict(next(iter(families[0].values()))))  # before it is forked, so that no fork builds it again
    left, _ = _in_forks(families, range(len(families)), to, processes)
    for number in left:
        died, end = _in_forks(families, [number], to, 1)
        for key in families[number] if died else ():
            to.tell(key, {"unknown": f"the process that counted them {end}", "passing": True})


def _in_forks(
    families: Sequence[Mapping[str, Any]], numbers: Sequence[int], to: _Answers, processes: int
) -> tuple[list[int], str]:
    """Answers the families of these numbers. Returns the numbers of those that were left unanswered, and how the
    process that failed last ended."""
    (waiting, put), (done, answered) = os.pipe(), os.pipe()
    os.write(put, b"".join(map(_NUMBER.pack, numbers)))  # a pipe holds more than a sweep has points
    os.close(put)
    forks = [_fork(families, to, waiting, answered) for _ in range(min(processes, len(numbers)))]
    os.close(waiting)
    os.close(answered)
    with os.fdopen(done, "rb") as file:
        left = set(numbers) - {number for (number,) in _NUMBER.iter_unpack(file.read())}
    end = ""
    for pid, stderr in forks:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with stderr:
            end = how_it_ended(code, stderr) if code else end
    return sorted(left), end


def _fork(families: Sequence[Mapping[str, Any]], to: _Answers, waiting: int, answered: int) -> tuple[int, IO[bytes]]:
    """Starts a process that answers the families whose numbers it takes. Returns its pid, and a file for what it prints
    to stderr."""
    parent, stderr = os.getpid(), tempfile.TemporaryFile()  # noqa: SIM115  it is read when the process has ended
    if pid := os.fork():
        return pid, stderr
    code = 1
    try:
        os.dup2(stderr.fileno(), 2)
        os.dup2(2, 1)
        die_with_parent(parent)
        torch.set_num_threads(1)  # fake tensors need no more: see [Note: threads after a fork]
        while len(taken := os.read(waiting, _NUMBER.size)) == _NUMBER.size:
            _answer_family(families[_NUMBER.unpack(taken)[0]], to)
            os.write(answered, taken)
        code = 0
    except Exception as error:  # it is reported by the code; nothing of the parent's own may run here
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)


def _count() -> int:
    """How many processes count: as many as this one may use cores, and at most MOST."""
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1, MOST)


def main(asked: Mapping[str, Any] | None = None) -> None:
    """Answers on stdout what is asked; None reads it from stdin."""
    # Libraries, C code included, may print to stdout. From here on their output goes to stderr instead.
    to = _Answers(os.fdopen(os.dup(1), "w", encoding="utf-8"))
    os.dup2(2, 1)
    asked = json.load(sys.stdin) if asked is None else asked
    for key, config in asked["units"].items():
        to.tell(key, _answer(from_dict(config)))
    _answer_families(asked["activations"], to, _count())
