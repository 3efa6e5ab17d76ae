"""The configuration as frozen dataclasses: one for each group of conf/, each checking its own values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from orchestrator.config.cluster import Cluster
from orchestrator.config.optimizer import Optimizer, Scheduler
from orchestrator.config.state_groups import Offload, Precision, Zero
from orchestrator.config.strict import ConfigError, Limits, Word, build


class DataKind(Word):
    stdlib = "stdlib"
    text = "text"
    synthetic = "synthetic"


class Tokenizer(Word):
    auto = "auto"
    bytes = "bytes"
    model = "model"


class AdapterKind(Word):
    none = "none"
    lora = "lora"


class RecomputeKind(Word):
    none = "none"
    full = "full"
    every_nth = "every_nth"
    by_operation = "by_operation"


class ActivationPlace(Word):
    none = "none"
    cpu = "cpu"


class LossKind(Word):
    full = "full"
    tiled = "tiled"


class CheckpointKind(Word):
    none = "none"
    sharded = "sharded"


class WeightsExport(Word):
    none = "none"
    bf16 = "bf16"
    fp16 = "fp16"


class Device(Word):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class TrackingKind(Word):
    mlflow = "mlflow"
    none = "none"


@dataclass(frozen=True)
class Batch:
    """Counts are sequences, `seq` is tokens; global_size = micro x accumulation x ranks."""

    micro: int = 4
    accumulation: int | None = None
    global_size: int | None = None
    seq: int = 128

    def __post_init__(self) -> None:
        limits = Limits(vars(self), "batch")
        limits.at_least(1, micro=1, accumulation=None, global_size=None)
        limits.at_least(2, seq=128)
        limits.conclude()


@dataclass(frozen=True)
class Model:
    """A transformers architecture (`model_type`) and the arguments of its configuration, with random weights; or the
    folder `path`, as save_pretrained writes it, with its own of all three."""

    name: str
    model_type: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    path: str | None = None


@dataclass(frozen=True)
class Adapter:
    """LoRA (arXiv 2106.09685): the model is frozen, and products of two matrices of this rank, times alpha / rank, are
    trained beside its linear layers: those whose names end in one of `targets`, or all but the head where it is empty.
    """

    kind: AdapterKind = AdapterKind.none
    rank: int = 8
    alpha: float = 16.0
    targets: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        limits = Limits(vars(self), "adapter")
        limits.at_least(1, rank=8)
        limits.must("alpha", lambda value: value > 0, "above 0", 16)
        limits.conclude()


@dataclass(frozen=True)
class Data:
    """What is read; `path` belongs to kind text alone.

    `tokenizer`: bytes makes one token of each byte, model takes that of `model.path`, auto is model where there is one.
    """

    kind: DataKind = DataKind.stdlib
    path: str | None = None
    tokenizer: Tokenizer = Tokenizer.auto
    validation_fraction: float = 0.05

    def __post_init__(self) -> None:
        limits = Limits(vars(self), "data")
        limits.must("validation_fraction", lambda value: 0 <= value < 1, "from 0 to below 1", 0.05)
        limits.must("path", bool, "a file or folder, or null", None)
        limits.conclude()


@dataclass(frozen=True)
class Recompute:
    """Activation checkpointing: full keeps only each block's input and runs its forward again in backward, every_nth
    does so to the last of every `every` blocks, by_operation keeps the outputs of matrix products too. `offload` cpu:
    what blocks keep rests in the host's memory until backward; on a CPU that is where it is."""

    kind: RecomputeKind = RecomputeKind.none
    every: int = 2
    offload: ActivationPlace = ActivationPlace.none

    def __post_init__(self) -> None:
        limits = Limits(vars(self), "recompute")
        limits.at_least(1, every=2)
        limits.conclude()


@dataclass(frozen=True)
class Loss:
    """The cross entropy of all logits at once, or of `tile` tokens' logits at a time, made again in backward."""

    kind: LossKind = LossKind.full
    tile: int = 1024

    def __post_init__(self) -> None:
        limits = Limits(vars(self), "loss")
        limits.at_least(1, tile=1024)
        limits.conclude()

    @property
    def tile_tokens(self) -> int | None:
        """Tokens whose logits exist at a time; None for all."""
        return self.tile if self.kind is LossKind.tiled else None


@dataclass(frozen=True)
class Checkpoint:
    """Saving of the model states, and going on from what was saved.

    Saved after every `every` steps (null: at the end alone); the last `keep_last` stay, and each `keep_every`-th step.
    `background`: training goes on while the files are written. `resume`: none starts anew, auto goes on from the newest
    good checkpoint of the same point where there is one, a folder goes on from that checkpoint, whatever its world.
    `weights`: bf16 or fp16 gathers the trained weights at the end and leaves them as a Hugging Face folder.
    """

    kind: CheckpointKind = CheckpointKind.none
    every: int | None = None
    keep_last: int = 2
    keep_every: int | None = None
    background: bool = True
    resume: str = "none"
    weights: WeightsExport = WeightsExport.none

    def __post_init__(self) -> None:
        limits = Limits(vars(self), "checkpoint")
        limits.at_least(1, every=None, keep_last=2, keep_every=None)
        limits.must("resume", bool, "none, auto or the folder of a checkpoint", "none")
        limits.conclude()


@dataclass(frozen=True)
class Resources:
    """`ranks` null = the GPUs there, else 2; `threads` null = cores // ranks; the limit is of one run.

    nodes: machines that the ranks are spread over, as many on each.
    stuck_s: how long a rank may keep the others waiting in a collective before the run is ended, in every step. While
    ranks load and compile before the first step it is 300, where stuck_s is less.
    """

    device: Device = Device.auto
    ranks: int | None = None
    nodes: int = 1
    threads: int | None = None
    time_limit_min: float = 60.0
    stuck_s: float = 60.0

    def __post_init__(self) -> None:
        limits = Limits(vars(self), "resources")
        limits.at_least(1, ranks=None, nodes=1, threads=None)
        limits.must("time_limit_min", lambda value: value > 0, "above 0", 60)
        limits.must("stuck_s", lambda value: value > 0, "above 0", 60)
        limits.conclude()


@dataclass(frozen=True)
class Measure:
    """Steps left out of the numbers, steps counted, and batches of the validation after them."""

    warmup_steps: int = 5
    steps: int = 25
    validation_batches: int = 2

    def __post_init__(self) -> None:
        limits = Limits(vars(self), "measure")
        limits.at_least(0, warmup_steps=0, validation_batches=0)
        limits.at_least(1, steps=25)
        limits.conclude()


@dataclass(frozen=True)
class Tracking:
    """`uri` null = an SQLite file beside the outputs; `experiment` null = a name of the project's."""

    kind: TrackingKind = TrackingKind.mlflow
    uri: str | None = None
    experiment: str | None = None


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One point. After rules.resolve() nothing about ranks, threads, the batch or the device is left open."""

    seed: int = 1234
    output: str = "outputs"
    zero: Zero = field(default_factory=Zero)
    precision: Precision = field(default_factory=Precision)
    offload: Offload = field(default_factory=Offload)
    batch: Batch = field(default_factory=Batch)
    model: Model
    adapter: Adapter = field(default_factory=Adapter)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    scheduler: Scheduler = field(default_factory=Scheduler)
    recompute: Recompute = field(default_factory=Recompute)
    loss: Loss = field(default_factory=Loss)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    resources: Resources = field(default_factory=Resources)
    cluster: Cluster = field(default_factory=Cluster)
    measure: Measure = field(default_factory=Measure)
    tracking: Tracking = field(default_factory=Tracking)

    def __post_init__(self) -> None:
        root_limits(vars(self)).conclude()


def root_limits(values: Mapping[str, Any]) -> Limits:
    """What is out of range among the values that belong to no group."""
    limits = Limits(values)
    limits.must("seed", lambda value: 0 <= value < 2**32, "from 0 to 2^32 - 1", 1234)
    limits.must("output", bool, "the name of a folder", "outputs")
    return limits


def to_dict(config: RunConfig) -> dict[str, Any]:
    """Plain data, ready for JSON: enums become their names."""
    return {key: _plain(value) for key, value in asdict(config).items()}


def from_dict(data: Mapping[str, Any]) -> RunConfig:
    """The inverse of to_dict. ConfigError tells every unknown key, wrong type and bad value at once."""
    config, broken = build(RunConfig, data)
    if broken:
        raise ConfigError(broken)
    return config


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return value
