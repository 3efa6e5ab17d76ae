"""A cache of the shapes and counts that memory is predicted from, computed by a child process if they are missing.

The child imports torch, so that this process does not have to. Answers are stored in the user's cache, with a key made
of the settings that they depend on.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any

from orchestrator.config.parts import plain
from orchestrator.config.schema import Device, RunConfig, to_dict
from orchestrator.machine import children, provenance
from orchestrator.records.cache import read_cached, read_cached_object, write_cached
from orchestrator.text.paths import CODE

# The groups that a model's units and the optimizer's states depend on, next to unit_numel and ratio in `units_key`.
DECIDING = ("model", "adapter", "optimizer", "precision", "parallel")
SILENCE_S = 120.0  # that the child may take for one answer
TELL_S = 2.0
LIBRARIES = ("torch", "transformers", "peft")  # whose code affects the answers
ANSWERING = ("zero_runtime", "orchestrator/worker", "orchestrator/workloads")  # the packages that answer
LEAN = "lean"  # see orchestrator/worker/lean_imports.py
LACKING = ("ImportError", "ModuleNotFoundError", "AttributeError")
TRACE, WORK = "trace-", "work-"  # the starts of the keys of traces, and of the work of their segments
Tell = Callable[[str], None]
Answer = Mapping[str, Any]


def units_key(config: RunConfig) -> str:
    """The key of the units of a model and the costs of its optimizer."""
    parts: dict[str, Any] = {name: plain(getattr(config, name)) for name in DECIDING}
    parts |= {"unit_numel": config.zero.unit_numel, "ratio": config.offload.ratio, "kind": str(config.measure.kind)}
    return _hash(parts)


def activations_key(config: RunConfig, *, any_micro: bool = False) -> str:
    """The key of the activations of a micro-batch. `any_micro`: the key of all configurations that differ only in its
    size."""
    precision = config.precision
    groups = ("model", "adapter", "recompute", "loss", "parallel")
    parts: dict[str, Any] = {name: plain(getattr(config, name)) for name in groups}
    parts |= {"compute": precision.compute, "keep": precision.keep_dtype, "seq": config.batch.seq}
    parts |= {"unit_numel": config.zero.unit_numel}  # the trace has marks by unit
    parts |= {"kind": str(config.measure.kind)}
    if (matrices := config.optimizer.rule.matrix_patterns) is not None:  # in units of their own
        parts |= {"matrices": matrices}
    parts |= {"cuda": config.resources.device is Device.cuda, "micro": None if any_micro else config.batch.micro}
    return "activations-" + _hash(parts)


def trace_key(config: RunConfig, *micros: int) -> str:
    """The key of the trace of all micro-batches from the first to the second; without them the start of all such
    keys."""
    return f"{TRACE}{activations_key(config, any_micro=True)}-{'-'.join(map(str, micros))}"


def work_key(config: RunConfig, *micros: int) -> str:
    """The key of the work of the trace with these micro-batches."""
    return WORK + trace_key(config, *micros).removeprefix(TRACE)


def _hash(parts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


@functools.cache
def folder() -> str:
    """The name of the folder in the cache: a hash of the code and the versions of libraries that answers depend on."""
    return _folder("shapes", ANSWERING)


@functools.cache
def _recalled_folder() -> str:
    """The same of what is computed from answers."""
    return _folder("peaks", (*ANSWERING, "orchestrator/config", "orchestrator/plan"))


def _folder(name: str, rooms: Sequence[str]) -> str:
    """Of complete packages: a list of single files becomes wrong when code moves, and a stale prediction is worse than
    one that is computed again."""
    versions = [provenance.version_of(library) or "none" for library in LIBRARIES]
    source = " ".join([*map(_digest, rooms), *versions])
    return f"{name}-{hashlib.sha256(source.encode()).hexdigest()[:8]}"


@functools.cache
def _digest(room: str) -> str:
    """A hash of the code of a package."""
    source = b"".join(file.read_bytes() for file in sorted((CODE / room).rglob("*.py")))
    return hashlib.sha256(source).hexdigest()


def stored(key: str) -> Any | None:
    """The stored answer; None if it is missing or damaged."""
    with suppress(OSError):  # of a file of the code that has just vanished
        return read_cached(folder(), key)
    return None


def store(key: str, answer: Any) -> None:
    """Stores the answer. If there is no folder for it, the answer is computed again next time."""
    with suppress(OSError):
        write_cached(folder(), key, answer)


def recalled(key: str, compute: Callable[[], Any]) -> Any:
    """What was computed from answers, as plain data: stored under the key, or computed now and, if not None, stored.

    The key must name the answers, and everything else that the result depends on but the code.
    """
    known = None
    with suppress(OSError):
        known = read_cached(_recalled_folder(), key)
    if known is None:
        known = compute()
        with suppress(OSError):
            if known is not None:
                write_cached(_recalled_folder(), key, known)
    return known


def hash_of(*parts: object) -> str:
    """Of dataclasses, enums and plain values, whose representations have all that they hold."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def answers(
    units: Sequence[RunConfig],
    activations: Sequence[RunConfig],
    tell: Tell | None = None,
    *,
    within_s: float = math.inf,
) -> dict[str, Answer]:
    """The answer for each distinct configuration by its key, from the cache or from the child.

    Configurations for which the child fails, or takes longer than `within_s` in all, have none. `tell` is called at
    most every two seconds with its progress. What is "passing", such as that a process died, is not stored.
    """
    wanted = {units_key(config): config for config in units}
    counted = {activations_key(config): config for config in activations}
    known = stored_answers([*wanted, *counted])
    families = _unanswered(counted, known)
    asked = {
        "units": {key: to_dict(config) for key, config in wanted.items() if key not in known},
        "activations": [{key: to_dict(config) for key, config in family.items()} for family in families.values()],
    }
    total = len(asked["units"]) + sum(map(len, families.values()))
    for key, answer in _asked(asked, total, tell, within_s) if total else ():
        if not answer.get("passing"):
            store(key, answer)
        known[key] = answer
    for line, family in families.items():
        if all(key in known and not known[key].get("passing") for key in family):
            store(line, {"asked": True})
    return known


def _unanswered(counted: Mapping[str, RunConfig], known: Mapping[str, Any]) -> dict[str, dict[str, RunConfig]]:
    """The groups of configurations for the child, which differ only in the micro-batch, with their keys.

    A group was asked for together, or it is asked for again as a whole: answers that were found one by one have traces
    of one micro-batch each, which do not determine those between.
    """
    families: dict[str, dict[str, RunConfig]] = {}
    for key, config in counted.items():
        families.setdefault(activations_key(config, any_micro=True), {})[key] = config
    found = {}
    for name, family in families.items():
        micros = [config.batch.micro for config in family.values()]
        line = f"{name}-asked-{min(micros)}-{max(micros)}"
        if not known.keys() >= family.keys() or (len(family) > 1 and stored(line) is None):
            found[line] = family
    return found


def stored_answers(keys: Sequence[str]) -> dict[str, Answer]:
    """The stored answers by key, with the traces that they name."""
    known: dict[str, Answer] = {key: answer for key in keys if (answer := stored(key)) is not None}
    return known | _traces_of(known)


def _traces_of(known: dict[str, Answer]) -> dict[str, Answer]:
    """The stored traces that answers name. An answer without its trace is removed, so that it is computed again."""
    traces: dict[str, Answer] = {}
    for key, answer in list(known.items()):
        place = answer.get("trace")
        if place is None or place in traces:
            continue
        trace = None
        with suppress(OSError):
            trace = read_cached_object(folder(), place)  # not parsed: what follows from it may be known
        if trace is None:
            del known[key]
        else:
            traces[place] = trace
    return traces


def _asked(asked: Mapping[str, Any], total: int, tell: Tell | None, within_s: float) -> Iterator[tuple[str, Any]]:
    """The child's answers. What a lean child could not import is asked again, of one that imports everything."""
    lean, end, failed = not _has_adapter(asked), time.monotonic() + within_s, set()
    for key, answer in _ask_child(asked, total, tell, within_s, lean):
        if lean and ("unknown" in answer if key in asked["units"] else _lacks_import(answer)):
            failed.add(key)
        else:
            yield key, answer
    if failed:
        units = {key: one for key, one in asked["units"].items() if key in failed}
        families = [family for family in asked["activations"] if failed & family.keys()]
        again = {"units": units, "activations": families}
        yield from _ask_child(again, total, tell, end - time.monotonic(), False)


def _lacks_import(answer: Mapping[str, Any]) -> bool:
    """Whether something may have been missing that a lean child leaves out."""
    return str(answer.get("unknown", "")).startswith(LACKING)


def _ask_child(
    asked: Mapping[str, Any], total: int, tell: Tell | None, within_s: float = math.inf, lean: bool = False
) -> Iterator[tuple[str, Any]]:
    """The child's answers as they arrive. The child is killed if it is silent for SILENCE_S, or after `within_s`."""
    lines: SimpleQueue[str | None] = SimpleQueue()
    try:
        child = _child(lean=lean)
    except OSError:
        return
    # The thread blocks on the child's pipes, so that this one can check for silence.
    threading.Thread(target=_talk, args=(child, json.dumps(asked), lines), daemon=True).start()
    done, answered, reported = 0, time.monotonic(), (-1, time.monotonic())
    end = answered + within_s
    try:
        while (now := time.monotonic()) < min(answered + SILENCE_S, end):
            if tell is not None and done > reported[0] and time.monotonic() >= reported[1] + TELL_S:
                reported = done, time.monotonic()
                tell(f"counting without running: {done} of {total} models and activations")
            try:
                line = lines.get(timeout=min(TELL_S, end - now))
            except Empty:
                continue
            if line is None:
                return
            answered = time.monotonic()
            if (answer := _answer_in(line)) is not None:
                done += not answer[0].startswith((TRACE, WORK))
                yield answer
    finally:
        child.kill()
        child.wait()


def _answer_in(line: str) -> tuple[str, Any] | None:
    """The key and the answer in a line; None for a line that a library printed between the answers."""
    try:
        key, answer = json.loads(line)
    except (ValueError, TypeError, RecursionError):
        return None
    is_answer = isinstance(key, str) and isinstance(answer, dict)
    return (key, answer) if is_answer else None


@contextmanager
def started_ahead(*, needed: bool) -> Iterator[None]:
    """Within it, the child that `answers` asks is already importing its libraries, if that is expected to be needed.
    At the end it is killed if nothing was asked."""
    if needed:
        with suppress(OSError):
            _waiting.append(_start_child(lean=True))
    try:
        yield
    finally:
        while _waiting:
            with _waiting.pop() as child:
                child.kill()


_waiting: list[subprocess.Popen[str]] = []  # started ahead, and not asked yet


def _child(*, lean: bool) -> subprocess.Popen[str]:
    return _waiting.pop() if lean and _waiting else _start_child(lean=lean)


def _has_adapter(asked: Mapping[str, Any]) -> bool:
    """Whether a configuration that is asked for has one, for which the child needs more libraries."""
    families = (family.values() for family in asked["activations"])
    return any(one["adapter"]["kind"] != "none" for one in itertools.chain(asked["units"].values(), *families))


def _start_child(*, lean: bool) -> subprocess.Popen[str]:
    return subprocess.Popen(
        children.words("orchestrator.worker.count", *([LEAN] * lean)),
        env=children.environment({**os.environ, "CUDA_VISIBLE_DEVICES": ""}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        encoding="utf-8",
        errors="replace",
    )


def _talk(child: subprocess.Popen[str], asked: str, lines: SimpleQueue[str | None]) -> None:
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        with child.stdin:
            child.stdin.write(asked)
        for line in child.stdout:
            lines.put(line)
    except (OSError, ValueError):
        pass  # the child has ended or was killed
    lines.put(None)
