"""The predicted memory and time of a point, and what is said about them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from orchestrator.planning.predictor import Prediction
from orchestrator.text.units import size
from orchestrator.wings.predict import fit_rows
from orchestrator.wings.predict.moments import on_device, worst
from orchestrator.wings.predict.speed import Speed
from zero_runtime.predict.memory.activation_count import ActivationBytes
from zero_runtime.predict.memory.counted_unit import OPTIMIZER
from zero_runtime.predict.memory.device_overhead import NO_OVERHEAD, DeviceOverhead
from zero_runtime.predict.memory.outside_step import MomentBytes
from zero_runtime.predict.memory.step_memory import Peak
from zero_runtime.state_bytes import StateBytes

# Parts of a peak, where no table shows what they are parts of.
IN_FULL = {
    fit_rows.STATES[OPTIMIZER]: "optimizer states and masters",
    fit_rows.BLOCKS: "activations of the blocks",
    fit_rows.OUTSIDE: "embedding, head and loss",
    fit_rows.BACKWARD: "gradients of activations",
}
STEP = "a step"  # the name of its moment


@dataclass(frozen=True)
class PointPrediction:
    """The predicted memory of one rank in bytes, and the limit for a rank or for all ranks together.

    limit_bytes: None if it is not known. activations: None if they cannot be counted; `unknown` says
    why. overhead: the memory of CUDA, NCCL and cuBLAS. peak: the worst moment of a step, if the activations
    were traced. speed: of a step, if what it needs was measured here. remedies: overrides with which the point fits, if
    they were searched for (`advised`). host_bytes: of a rank's host memory in a step. outside: the moments outside of
    steps that the run meets. on_host: the ranks compute in host memory. ranks_per_node, host_limit_bytes: ranks of a
    node, and the host memory for them; None if it is not known, or is what the ranks compute in. without_offload: bytes
    of the same point without its offload, with the most that libraries take; None without an offload. attention: what
    is to be said of the model's; empty for torch's.
    """

    states: StateBytes
    limit_bytes: int | None
    ranks_share: int = 1  # ranks that share the limit
    activations: ActivationBytes | None = None
    unknown: str = ""
    overhead: DeviceOverhead = NO_OVERHEAD
    peak: Peak | None = None
    speed: Speed | None = None
    remedies: tuple[str, ...] = ()
    advised: bool = False
    host_bytes: int = 0
    outside: tuple[MomentBytes, ...] = ()
    on_host: bool = False
    ranks_per_node: int = 1
    host_limit_bytes: int | None = None
    without_offload: int | None = None
    attention: str = ""

    @property
    def needless(self) -> str:
        """That the offload is not needed; empty if it is."""
        needed, limit = self.without_offload, self.limit_bytes
        if needed is None or limit is None or needed * self.ranks_share > limit or self.cannot_fit:
            return ""
        return f"the offload is not needed: {size(needed)} of {size(limit)} without it"

    @property
    def moments(self) -> list[MomentBytes]:
        """The worst moment of a step, if the activations were traced, and those outside of steps."""
        if self.peak is None:
            return []
        return [MomentBytes(STEP, self.peak.total, self.host_bytes, self.peak.when), *self.outside]

    @property
    def worst(self) -> MomentBytes | None:
        """The moment that decides about the memory that the ranks compute in."""
        return worst(self.moments, shared=self.on_host)

    @property
    def _most_bytes(self) -> int:
        """At the worst moment; only of model states if the activations are not counted."""
        found = self.worst
        return self.states.total if found is None else on_device(found, shared=self.on_host)

    @property
    def needed_bytes(self) -> int:
        """The bytes that a rank holds at the worst moment that the run meets, with the least that libraries take; only
        of model states if the activations are not counted."""
        return self._most_bytes + self.overhead.least

    @property
    def ceiling_bytes(self) -> int | None:
        """The same with the most that libraries take, but without the buffers of kernels; None if the activations are
        not counted."""
        return None if self.peak is None else self._most_bytes + self.overhead.most

    @property
    def host_needed(self) -> MomentBytes | None:
        """The moment with the most bytes in a rank's host memory, where that is separate."""
        return None if self.on_host else max(self.moments, key=lambda one: one.host, default=None)

    @property
    def cannot_fit(self) -> bool:
        too_large = self.limit_bytes is not None and self.needed_bytes * self.ranks_share > self.limit_bytes
        return too_large or self.host_lacks

    @property
    def host_lacks(self) -> bool:
        """Whether a node has not enough host memory for its ranks."""
        host = self.host_needed
        limit = self.host_limit_bytes
        return host is not None and limit is not None and host.host * self.ranks_per_node > limit

    def to_dict(self) -> dict[str, Any]:
        """The prediction as plain data, for records and other programs."""
        states = {name: size for name, size in asdict(self.states).items() if name != "padding"}
        return {
            **states,
            "activations": asdict(self.activations) if self.activations else None,
            "activations_unknown": self.unknown,
            "needed": self.needed_bytes,
            "at_most": self.ceiling_bytes,
            **({"peak": asdict(self.peak)} if self.peak is not None else {}),
            **({"moments": [asdict(one) for one in self.moments]} if self.peak is not None else {}),
            **({"speed": self.speed.to_dict()} if self.speed is not None else {}),
            "limit": self.limit_bytes,
            **({"offload_needless": self.needless} if self.needless else {}),
            **({"attention": self.attention} if self.attention else {}),
            "ranks_share": self.ranks_share,
            **({"device_overhead": asdict(self.overhead)} if self.overhead.most else {}),
        }

    def brief(self) -> Prediction:
        """What a plan needs of it."""
        reason = cannot_fit(self) if self.cannot_fit else ""
        return Prediction(self.states.total, expected(self), reason, self.remedies, self.to_dict())


def cannot_fit(prediction: PointPrediction) -> str:
    """The reason why a point is pruned: its predicted bytes and the limit, and settings that would fit_rows."""
    share = f"{prediction.ranks_share} x " if prediction.ranks_share > 1 else ""
    states, limit = prediction.states, size(prediction.limit_bytes)
    overhead = _overhead_text(prediction.overhead)
    text = f"the model states alone, {share}{size(states.total)}, are more than {limit}"
    if overhead and states.total <= (prediction.limit_bytes or 0):
        text = f"the model states, {size(states.total)}, with {overhead} are more than {limit}"
    if prediction.worst is not None:
        text = _too_large(prediction, share, limit)
    if not prediction.advised:
        return text
    would = (
        f"would fit: {'   or   '.join(prediction.remedies[:3])}" if prediction.remedies else "no single setting fits"
    )
    return f"{text}; {would}"


def _too_large(prediction: PointPrediction, share: str, limit: str) -> str:
    """The worst moment of a run that is too large, and what its bytes are."""
    peak, moment, host = prediction.peak, prediction.worst, prediction.host_needed
    assert peak is not None
    assert moment is not None
    if host is not None and prediction.host_lacks:
        of_node = f"{prediction.ranks_per_node} x {size(host.host)}"
        return f"needs {of_node} of host memory {_at(host)}, more than a node's {size(prediction.host_limit_bytes)}"
    needs = f"needs {share}{size(prediction.needed_bytes)} {_at(moment)}, more than {limit}"
    if moment.name != STEP:
        return needs
    large = [(name, count) for name, count in fit_rows.parts(peak) if count * 100 >= peak.total]
    listed = [f"{IN_FULL.get(name, name)} {size(count)}" for name, count in large]
    listed += [f"host buffers of offload {size(moment.host)}"] * (prediction.on_host and moment.host > 0)
    overhead = _overhead_text(prediction.overhead)
    return f"{needs}: {', '.join([*listed, *[overhead] * bool(overhead)])}"


def _at(moment: MomentBytes) -> str:
    """When a moment is, as the end of a sentence."""
    return moment.why if moment.name == STEP else f"while {moment.name} ({moment.why})"


def expected(prediction: PointPrediction) -> str:
    """The prediction of a single run in one line; what it could not include is said."""
    peak, overhead, limit = prediction.peak, prediction.overhead, prediction.limit_bytes
    libraries = f", CUDA, cuBLAS and NCCL {size(overhead.least)} to {size(overhead.most)}" if overhead.most else ""
    shared = f" for {prediction.ranks_share} ranks" if prediction.ranks_share > 1 else ""
    room = f"; the limit is {size(limit)}{shared}" if limit is not None else "; the limit is not known"
    if peak is None:
        unknown = f"activations are not predicted: {prediction.unknown}"
        return f"{size(prediction.states.total)} of model states a rank{libraries}{room}; {unknown}"
    moment = prediction.worst
    assert moment is not None
    # Apart, because the peak that the run shows beside it is that of the device's tensors.
    copies = f" and {size(moment.host)} of copies in host memory" if prediction.on_host and moment.host else ""
    notes = "".join(f"; {text}" for text in (prediction.needless, prediction.attention) if text)
    return f"a peak of {size(moment.device)} of tensors a rank{copies}, {_at(moment)}{libraries}{room}{notes}"


def _overhead_text(overhead: DeviceOverhead) -> str:
    if not overhead.most:
        return ""
    return f"an allowance of {size(overhead.least)} for CUDA, cuBLAS and {overhead.communicators} NCCL communicators"
