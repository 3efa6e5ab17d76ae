"""Parameter groups: the hyperparameters that each parameter is updated with. Standard library only.

A group names parameters and gives them a factor of the schedule's learning rate, a weight decay, or both. Parameters
that no group names form one more group, the last. If a group sets no weight decay, its parameters have the
optimizer's, but norms and biases have none unless `no_decay` is switched off. A group may be empty or name only frozen
parameters: it then has no effect, but keeps its place among the rates. A tied parameter is known by its first name.
Groups do not split units: a shard is updated in runs of consecutive parameters with equal settings.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zero_runtime.errors import PlanError
from zero_runtime.flat_layout import FlatLayout

# Common names of norms: norm, norm1, input_layernorm, LayerNorm, q_norm, ln_1, ln_f.
_NORM_WORD = re.compile(r"^(ln|\w*norm)\d*$", re.IGNORECASE)


@dataclass(frozen=True)
class ParamGroup:
    """Parameters by name. `lr_scale` multiplies the schedule's rate."""

    names: tuple[str, ...]
    lr_scale: float = 1.0
    weight_decay: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.names, str):
            raise PlanError(f"group: expected names, found the text {self.names!r}; write ({self.names!r},)")
        if self.lr_scale < 0 or (self.weight_decay is not None and self.weight_decay < 0):
            raise PlanError(
                "group: expected lr_scale and weight_decay of at least 0, found "
                f"lr_scale={self.lr_scale}, weight_decay={self.weight_decay}"
            )


@dataclass(frozen=True)
class GroupSettings:
    """Settings of one parameter in addition to the optimizer's constants. `index` is the index of its group."""

    index: int
    lr_scale: float
    weight_decay: float


@dataclass(frozen=True)
class Run:
    """Elements [start, stop) of a shard: consecutive parameters with equal settings."""

    settings: GroupSettings
    start: int
    stop: int


class GroupTable:
    """The settings of every parameter. Raises PlanError for a name that no parameter has or that two groups have."""

    def __init__(
        self, groups: Sequence[ParamGroup], known: Iterable[str], *, weight_decay: float, no_decay: bool
    ) -> None:
        self._groups = tuple(groups)
        self._weight_decay = weight_decay
        self._no_decay = no_decay
        self._index: dict[str, int] = {}
        known = set(known)
        for index, group in enumerate(self._groups):
            for name in group.names:
                self._add(name, index, known)
        self.has_rest = bool(known - self._index.keys())

    def _add(self, name: str, index: int, known: set[str]) -> None:
        if name not in known:
            raise PlanError(
                f"group {index}: no parameter of the model is called {name!r}; expected names as named_parameters() "
                "tells them, a tied one by its first"
            )
        if name in self._index:
            raise PlanError(f"group {index}: {name!r} is in group {self._index[name]} already; name it once")
        self._index[name] = index

    def settings(self, name: str, shape: Sequence[int]) -> GroupSettings:
        """The settings of the parameter of this name and shape."""
        index = self._index.get(name, len(self._groups))
        group = self._groups[index] if index < len(self._groups) else ParamGroup(())
        decay = group.weight_decay
        if decay is None:
            decay = 0.0 if self._no_decay and goes_without_decay(name, shape) else self._weight_decay
        return GroupSettings(index, group.lr_scale, decay)

    def check_rates(self, lr: float | Sequence[float]) -> None:
        """Raise PlanError unless `lr` is one rate, or one per group and one more for the parameters in no group."""
        for one in (lr,) if isinstance(lr, (int, float)) else lr:
            if not isinstance(one, (int, float)) or not 0 <= one < math.inf:
                raise PlanError(f"lr: expected a finite rate of at least 0, found {one!r}; nothing was updated")
        if isinstance(lr, (int, float)):
            return
        named = len(self._groups)
        if len(lr) not in ({named + 1} if self.has_rest else {named, named + 1}):
            raise PlanError(
                f"lr: expected one rate, or {named} for the groups and one more for the parameters in none, "
                f"found {len(lr)} rates"
            )

    def rate(self, lr: float | Sequence[float], settings: GroupSettings) -> float:
        """The learning rate of one group: its factor times a single `lr`, or its own entry of a sequence `lr`."""
        return lr * settings.lr_scale if isinstance(lr, (int, float)) else lr[settings.index]

    def runs(self, layout: FlatLayout, shard: int) -> tuple[Run, ...]:
        """The elements of a shard as runs of equal settings; padding is in no run."""
        shapes = {segment.name: segment.shape for segment in layout.segments}
        runs: list[Run] = []
        for piece in layout.pieces(shard):
            settings = self.settings(piece.name, shapes[piece.name])
            start, stop = piece.shard_offset, piece.shard_offset + piece.stop - piece.start
            if runs and runs[-1].settings == settings:
                start = runs.pop().start
            runs.append(Run(settings, start, stop))
        return tuple(runs)


def goes_without_decay(name: str, shape: Sequence[int]) -> bool:
    """Whether common practice exempts it from weight decay: norms, biases, and tensors of at most one dimension."""
    owner, _, own = name.rpartition(".")
    words = owner.rpartition(".")[2].split("_")
    return len(shape) <= 1 or own == "bias" or any(_NORM_WORD.match(word) for word in words)
