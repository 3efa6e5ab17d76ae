"""A cache of the shapes and counts that memory is predicted from, computed by a child process if they are missing.

[Note: a cache changes no answer]
What is stored is the answer to a complete question, under a key that names all of the question: the settings, all of
our code, the interpreter, and the versions of the libraries that answer. A question about activations is one
micro-batch, or several of one configuration that are to be traced together; its answer and all of its traces are
stored once all of them are there, and are read for the same question alone. So the answer to a question does not depend
on what was asked before, nor on whether the cache can be written. Failures that may be gone next time ("passing") are
not stored.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from orchestrator import wings
from orchestrator.config.schema import Device, RunConfig, to_dict
from orchestrator.machine import provenance
from orchestrator.planning.predictor import Tell
from orchestrator.records.cache import read_cached, read_cached_object, write_cached
from orchestrator.wings.kinds.kind import sample_of
from orchestrator.wings.predict import counting_child
from orchestrator.wings.predict.counting_child import Answer
from orchestrator.wings.predict.transport import transport

# The groups that a model's units and the optimizer's states depend on, next to unit_numel and ratio in `units_key`.
DECIDING = ("model", "adapter", "optimizer", "precision", "parallel")
LIBRARIES = ("torch", "transformers", "peft", "numpy", "triton")  # whose code affects the answers
TRACE = counting_child.TRACE


def units_key(config: RunConfig) -> str:
    """The key of the units of a model and the costs of its optimizer."""
    parts: dict[str, Any] = {name: config.as_plain[name] for name in DECIDING}
    parts |= {"unit_numel": config.zero.unit_numel, "ratio": config.offload.ratio, "kind": str(config.measure.kind)}
    # Without the rate, which takes no memory, and of which a search tries many.
    parts["optimizer"] = {key: value for key, value in parts["optimizer"].items() if key != "lr"}
    return _hash(parts)


def activations_key(config: RunConfig, *, any_micro: bool = False) -> str:
    """The key of the activations of a micro-batch. `any_micro`: the key of all configurations that differ only in its
    size."""
    precision = config.precision
    groups = ("model", "adapter", "recompute", "loss", "parallel")
    parts: dict[str, Any] = {name: config.as_plain[name] for name in groups}
    parts |= {"compute": precision.compute, "keep": precision.keep_dtype, "sample": sample_of(config)}
    parts |= {"unit_numel": config.zero.unit_numel}  # the trace has marks by unit
    parts |= {"kind": str(config.measure.kind)}
    if (matrices := config.optimizer.rule.matrix_patterns) is not None:  # in units of their own
        parts |= {"matrices": matrices}
    if (weights := precision.dtypes.weights) is not None:  # so are matrices that are stored as codes
        parts |= {"weights": weights}
    if (autocast := autocast_of(config)) is not None:
        parts |= {"autocast": autocast}
    if config.parallel.tp > 1:  # the sums of the layers receive tensors
        parts |= {"comm": transport(config)}
    parts |= {"cuda": config.resources.device is Device.cuda, "micro": None if any_micro else config.batch.micro}
    return "activations-" + _hash(parts)


def autocast_of(config: RunConfig) -> str | None:
    """The dtype of torch.autocast around the forward of the configuration's engine; None: it uses none."""
    if config.engine.is_own:
        return None
    tell = getattr(wings.load(wings.ENGINES[config.engine.kind]), "autocast_of", None)
    return tell(config) if tell is not None else None


def trace_prefix(config: RunConfig) -> str:
    """The start of the keys of all traces of configurations that differ from this one only in the micro-batch."""
    return f"{TRACE}{activations_key(config, any_micro=True)}-"


def trace_key(family: Sequence[RunConfig], low: int, high: int) -> str:
    """The key of the trace of the micro-batches from low to high, in the answer to the question about `family`."""
    return f"{Question.of(family).traces}{low}-{high}"


def _hash(parts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Question:
    """Configurations by activations key that differ only in the micro-batch and are traced together.

    traces: the start of the keys of its traces.
    """

    configs: Mapping[str, RunConfig]
    traces: str

    @classmethod
    def of(cls, family: Sequence[RunConfig]) -> Question:
        micros = sorted({config.batch.micro for config in family})
        name = f"{trace_prefix(family[0])}{'.'.join(map(str, micros))}-"
        return cls({activations_key(config): config for config in family}, name)

    @property
    def key(self) -> str:
        return "asked-" + self.traces.removeprefix(TRACE)

    def read(self) -> dict[str, Answer]:
        """The stored answers and traces; empty if one of them is missing or damaged."""
        complete = stored(self.key)
        if complete is None:
            return {}
        traces: dict[str, Answer] = {}
        for name in complete["traces"]:
            trace = None
            with suppress(OSError):
                trace = read_cached_object(folder(), name)  # not parsed: what follows from it may be known
            if trace is None:
                return {}
            traces[name] = trace
        return {**complete["answers"], **traces}

    def keep(self, known: Mapping[str, Answer]) -> None:
        """Stores the answers if all are there and none is passing."""
        answers = {key: known[key] for key in self.configs if key in known}
        if len(answers) < len(self.configs) or any(answer.get("passing") for answer in answers.values()):
            return
        traces = [name for name in known if name.startswith(self.traces)]
        for name in traces:
            store(name, known[name])
        store(self.key, {"answers": answers, "traces": traces})  # last: it says that the others are there


@functools.cache
def folder() -> str:
    """The name of the folder in the cache: a hash of our code, and of the versions that answers depend on."""
    versions = [provenance.version_of(library) or "none" for library in LIBRARIES]
    python = [platform.python_implementation(), platform.python_version(), platform.machine()]
    source = " ".join([provenance.code_digest(), *python, *versions])
    return f"counts-{hashlib.sha256(source.encode()).hexdigest()[:8]}"


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

    The key must name the answers, and everything else that the result depends on but the code and the versions.
    """
    known = stored(key)
    if known is None:
        known = compute()
        if known is not None:
            store(key, known)
    return known


def hash_of(*parts: object) -> str:
    """Hash of values whose `repr` is complete (dataclasses, enums, plain data)."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def answers(
    units: Sequence[RunConfig],
    activations: Sequence[RunConfig],
    tell: Tell | None = None,
    *,
    within_s: float = math.inf,
    together: bool = False,
) -> dict[str, Answer]:
    """The answer for each distinct configuration by its key, and all traces, from the cache or from the child.

    together: configurations of `activations` that differ only in the micro-batch are one question, so that the traces
    cover the micro-batches between them too. What could not be counted, or not within `within_s` in all, has the reason
    as its answer, {"unknown": reason}. `tell` is called with the child's progress.
    """
    wanted = {units_key(config): config for config in units}
    known: dict[str, Answer] = {key: answer for key in wanted if (answer := stored(key)) is not None}
    questions = []
    for question in _questions(activations, together=together):
        if found := question.read():
            known |= found
        else:
            questions.append(question)
    asked = {
        "units": {key: to_dict(config) for key, config in wanted.items() if key not in known},
        "activations": [{key: to_dict(config) for key, config in one.configs.items()} for one in questions],
    }
    if asked["units"] or questions:
        _ask(asked, questions, known, tell, within_s)
    return known


def _ask(
    asked: Mapping[str, Any],
    questions: Sequence[Question],
    known: dict[str, Answer],
    tell: Tell | None,
    within_s: float,
) -> None:
    """Adds the child's answers to `known`, and stores each question as soon as it is answered."""
    by_key = {key: question for question in questions for key in question.configs}
    child = counting_child.Counting(asked, tell, within_s)
    for key, answer in child.answers():
        known[key] = answer
        if key in by_key:
            by_key[key].keep(known)
        elif not key.startswith(TRACE) and not answer.get("passing"):
            store(key, answer)
    for key in (by_key.keys() | asked["units"].keys()) - known.keys():
        known[key] = {"unknown": child.silence, "passing": True}


def _questions(configs: Sequence[RunConfig], *, together: bool) -> Iterator[Question]:
    """The distinct questions about the configurations."""
    families: dict[str, dict[str, RunConfig]] = {}
    for config in configs:
        families.setdefault(activations_key(config, any_micro=together), {})[activations_key(config)] = config
    return (Question.of(list(family.values())) for family in families.values())
