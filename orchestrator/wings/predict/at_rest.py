"""`zlab fit` for a mixture of experts: the bytes of its states, which routing does not change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from orchestrator.config.schema import RunConfig
from orchestrator.config.strict import Refusal
from orchestrator.exit_codes import FAILED, OK
from orchestrator.planning.point import Point
from orchestrator.report.screen import Screen
from orchestrator.report.summary import Row, Table
from orchestrator.text.units import ABSENT, many, size
from orchestrator.wings.kinds.kind import ROUTED
from orchestrator.wings.predict.counting_child import Answer
from orchestrator.wings.predict.fit_words import document
from orchestrator.wings.predict.memory_cache import units_key
from orchestrator.wings.predict.prediction import overhead_of, target_here
from orchestrator.wings.predict.step import Memories, states_of, units_of
from zero_runtime.state_bytes import StateBytes

SAME_STATES = ("recompute=", "loss=")  # words that change no state


class Resting(NamedTuple):
    """What a rank holds of one configuration. host: bytes that it offloads. limit: bytes that it may use; None if that
    is not known. fits: no, or perhaps: what routing decides is not in it."""

    label: str
    config: RunConfig
    states: StateBytes
    buffers: int
    host: int
    limit: int | None
    fits: str

    @property
    def nbytes(self) -> int:
        return self.states.total + self.buffers

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for other programs."""
        states = {f"{name}_bytes": getattr(self.states, name) for name in ("params", "grads", "optimizer")}
        resting = {"resting_bytes": self.nbytes, "host_bytes_per_rank": self.host, "limit_bytes": self.limit}
        return {"label": self.label, **states, **resting, "fits": self.fits, "unknown": ROUTED}


def experts(points: Sequence[Point], answers: Mapping[str, Answer]) -> str:
    """What says that a model of the points is a mixture of experts; empty if none is."""
    found = (answers.get(units_key(point.config), {}).get("experts", "") for point in points)
    return next(filter(None, found), "")


def rows(points: Sequence[Point], answers: Mapping[str, Answer]) -> list[Resting]:
    """One row for each of the points whose states differ, those with the fewest bytes last."""
    found: dict[tuple[str, ...], Resting] = {}
    for point in points:
        shapes = answers.get(units_key(point.config), {})
        key = tuple(word for word in point.overrides if not word.startswith(SAME_STATES))
        if "units" in shapes and key not in found:
            found[key] = _row(point, shapes, Memories(answers))
    return sorted(found.values(), key=lambda one: -one.nbytes)


def _row(point: Point, shapes: Answer, memories: Memories) -> Resting:
    config, target = point.config, target_here(point.config)
    states = states_of(config, units_of(config, shapes))
    memory = memories.of(config)
    assert memory is not None, "a point with shapes has a memory"
    host, buffers = memory.away().host, int(shapes["buffer_bytes"])
    limit = None if target.device_bytes is None else target.device_bytes // target.ranks_share
    least = states.total + buffers + overhead_of(config).least
    lacks = limit is not None and least > limit
    node = target.host_bytes if overhead_of(config).least else None
    lacks = lacks or (node is not None and host * target.ranks_per_node > node)
    label = point.label.replace("-tiled", "").replace("-by_operation", "")
    return Resting(label, config, states, buffers, host, limit, "no" if lacks else "perhaps")


def show(screen: Screen, found: Sequence[Resting], why: str, *, as_json: bool) -> int:
    """Prints the rows. Returns 0, or 1 if the states of no row fit."""
    code = OK if any(one.fits != "no" for one in found) else FAILED
    if as_json:
        print(document(found[0].config.model.name, found))
        return code
    config, states = found[0].config, [one.states for one in found]
    node = config.hardware.name if config.hardware.is_described else "this machine"
    limit = "" if found[0].limit is None else f", {size(found[0].limit)} for a rank"
    held = f"parameters {config.precision.dtypes.param}, {config.optimizer.rule.kind}"
    model = Row("model", f"{config.model.name}, a mixture of experts ({why}); {held}")
    screen.rows([model, Row("machine", f"{node}: {many(config.ranks, 'rank')}{limit}")])
    header = ("row", "fits", "at rest", "parameters", "gradients", "optimizer", "host")
    cells = [
        (one.label, one.fits, *map(size, (one.nbytes, of.params, of.grads, of.optimizer)), _shown(one.host))
        for one, of in zip(found, states, strict=True)
    ]
    screen.console.print()
    screen.say("bytes of one rank at rest, all experts included", "bold")
    screen.table(Table(header, tuple(cells)))
    screen.console.print()
    unknown = Row("not known", f"activations, peak and time of a step: {ROUTED}")
    screen.rows([unknown, Row("perhaps", "model states fit; activations are unknown")])
    return code


def _shown(nbytes: int) -> str:
    return size(nbytes) if nbytes else ABSENT


def refuse_flags(flags: Mapping[str, Any]) -> None:
    """Refusal if one of the flags is asked for, all of which show what routing decides."""
    if asked := [f"--{name}" for name, value in flags.items() if value]:
        why = "a mixture of experts is answered with its bytes at rest alone"
        raise Refusal([f"{' and '.join(asked)}: {why}: {ROUTED}      fix: leave {' and '.join(asked)} out"])
