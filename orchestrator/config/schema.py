"""The configuration as frozen dataclasses: one for each group of conf/, each checking its own values."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.config.cluster import Cluster
from orchestrator.config.comm import Comm
from orchestrator.config.engine import EngineChoice
from orchestrator.config.hardware import GpuNode
from orchestrator.config.optimizer import Optimizer, Scheduler
from orchestrator.config.parallel import Parallel
from orchestrator.config.parts import plain
from orchestrator.config.state_groups import Offload, Precision, Zero
from orchestrator.config.strict import ConfigError, Limits, Word, build
from zero_runtime.activations.rule import RecomputeRule

MOST_THREADS = 4096  # more than any machine's cores
ALL_LINEAR = "all-linear"  # PEFT's word for what an empty adapter.targets means


class DataKind(Word):
    stdlib = "stdlib"
    text = "text"
    pairs = "pairs"
    synthetic = "synthetic"


class Tokenizer(Word):
    auto = "auto"
    bytes = "bytes"
    model = "model"


class AdapterKind(Word):
    none = "none"
    lora = "lora"


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


class MeasureKind(Word):
    train = "train"
    eval = "eval"


class Device(Word):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class TrackingKind(Word):
    mlflow = "mlflow"
    none = "none"


@dataclass(frozen=True)
class Batch:
    """The sizes of a step: global_size = micro x accumulation x ranks / parallel.tp / parallel.sp.

    `micro`: sequences of a micro-batch of one rank. `accumulation`: micro-batches of a step; null follows from
    global_size, or is 1. `global_size`: sequences of a step of all ranks; null follows from the others. `seq`: tokens
    of a sequence; of a source and of a target each; none of an image. `at_limit`: the micro-batch is the largest one
    that is predicted to fit, of those that divide global_size over the ranks, whatever micro and accumulation say.
    """

    micro: int = 4
    accumulation: int | None = None
    global_size: int | None = None
    seq: int = 128
    at_limit: bool = False

    def __post_init__(self) -> None:
        limits = Limits(vars(self), "batch")
        limits.at_least(1, micro=1, accumulation=None, global_size=None, seq=128)
        if self.at_limit and self.global_size is None:
            limits.refuse("batch.at_limit keeps batch.global_size and needs it", None, "batch.global_size=32")
        limits.conclude()


@dataclass(frozen=True, kw_only=True)
class ResolvedBatch(Batch):
    """A batch with all of its sizes."""

    accumulation: int = field()
    global_size: int = field()


@dataclass(frozen=True)
class Model:
    """A transformers architecture (`model_type`), with the arguments of its configuration (`config`) and random
    weights; or the folder `path`, as written by save_pretrained, which contains all three.

    `name`: the name in tables. `adapter`: a folder of LoRA adapters, as written by PEFT, which are added to the weights
    of `path`; a `path` that is such a folder is its base with these adapters.
    """

    name: str
    model_type: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    path: str | None = None
    adapter: str | None = None


@dataclass(frozen=True)
class Adapter:
    """LoRA (arXiv 2106.09685): the model is frozen, and a product of two matrices of rank `rank`, times alpha / rank,
    is trained next to each of its linear layers whose names end in one of `targets`. An empty `targets`, or
    all-linear, means all linear layers except the head.

    `alpha`: the factor of the product, before it is divided by `rank`.
    """

    kind: AdapterKind = AdapterKind.none
    rank: int = 8
    alpha: float = 16.0
    targets: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.targets == [ALL_LINEAR]:
            object.__setattr__(self, "targets", [])  # so that a point has one id
        limits = Limits(vars(self), "adapter")
        limits.at_least(1, rank=8)
        limits.must("alpha", lambda value: value > 0, "above 0", 16)
        limits.conclude()


@dataclass(frozen=True)
class Data:
    """The text, pairs or tokens that the model is trained on.

    `path`: a file or folder: of text, for kind text; of prompts and responses, for kind pairs. `tokenizer`: bytes makes
    one token of each byte, model uses the tokenizer in `model.path`, and auto is model if there is one, else
    bytes. `validation_fraction`: the share of the sequences that is held out for the validation loss. `packing`:
    several short pairs share a sequence of batch.seq tokens, without attending to each other.
    """

    kind: DataKind = DataKind.stdlib
    path: str | None = None
    tokenizer: Tokenizer = Tokenizer.auto
    validation_fraction: float = 0.05
    packing: bool = False

    def __post_init__(self) -> None:
        limits = Limits(vars(self), "data")
        limits.must("validation_fraction", lambda value: 0 <= value < 1, "from 0 to below 1", 0.05)
        limits.must("path", bool, "a file or folder, or null", None)
        limits.conclude()


@dataclass(frozen=True)
class Loss:
    """The cross entropy of all logits at once (full), or of the logits of `tile` tokens at a time, which are recomputed
    in backward (tiled)."""

    kind: LossKind = LossKind.full
    tile: int = 1024

    def __post_init__(self) -> None:
        limits = Limits(vars(self), "loss")
        limits.at_least(1, tile=1024)
        limits.conclude()

    @property
    def tile_tokens(self) -> int | None:
        """The number of tokens whose logits exist at the same time; None for all."""
        return self.tile if self.kind is LossKind.tiled else None


@dataclass(frozen=True)
class Checkpoint:
    """Saving model states, and resuming from a checkpoint.

    A checkpoint is saved after every `every` steps (null: only at the end). The last `keep_last` are kept, and those of
    every `keep_every`-th step. `background`: training continues while the files are written. `resume`: none starts from
    the beginning; auto resumes from the newest good checkpoint of the same point, if there is one; a folder resumes
    from that checkpoint, whatever the number of ranks that saved it. `weights`: bf16 or fp16 gathers the trained
    weights at the end and writes them as a Hugging Face folder. `node_folder`: a folder on each node's own disk, where
    its ranks save and resume, for machines without a shared disk; null is the output folder, which all nodes share.
    """

    kind: CheckpointKind = CheckpointKind.none
    every: int | None = None
    keep_last: int = 2
    keep_every: int | None = None
    background: bool = True
    resume: str = "none"
    weights: WeightsExport = WeightsExport.none
    node_folder: str | None = None

    def __post_init__(self) -> None:
        limits = Limits(vars(self), "checkpoint")
        limits.at_least(1, every=None, keep_last=2, keep_every=None)
        limits.must("resume", bool, "none, auto or the folder of a checkpoint", "none")
        limits.must("node_folder", lambda path: path is None or path.startswith("/"), "null or an absolute path", None)
        limits.conclude()


@dataclass(frozen=True)
class Resources:
    """The processes of a run, where they compute, and how long they may take.

    `device`: auto is cuda if torch can use a GPU, else cpu. `ranks`: null = the number of GPUs, or 2 on a CPU.
    `threads`: null = cores // ranks. `time_limit_min`: the limit of one run in minutes. `nodes`: the number of
    machines, each with the same number of ranks. `stuck_s`: how many seconds a rank may keep the others waiting in a
    collective of a step before the run is ended. Before the first step, while ranks load and compile, the limit is at
    least 300 seconds. `memory_mib`: the memory that one rank may use, by which predictions judge it; null = that of its
    GPU, or its share of the host's. `code`: a folder with another checkout of this program, from which the ranks run;
    null = this one. As an axis of a sweep it makes two versions take turns.
    """

    device: Device = Device.auto
    ranks: int | None = None
    nodes: int = 1
    threads: int | None = None
    time_limit_min: float = 60.0
    stuck_s: float = 60.0
    memory_mib: int | None = None
    code: str | None = None

    def __post_init__(self) -> None:
        limits = Limits(vars(self), "resources")
        limits.must("code", lambda value: value is None or bool(value), "a folder, or null", None)
        limits.at_least(1, ranks=None, nodes=1, memory_mib=None)
        limits.must("threads", lambda value: 1 <= value <= MOST_THREADS, f"from 1 to {MOST_THREADS}", None)
        limits.must("time_limit_min", lambda value: value > 0, "above 0", 60)
        limits.must("stuck_s", lambda value: value > 0, "above 0", 60)
        limits.conclude()


@dataclass(frozen=True, kw_only=True)
class ResolvedResources(Resources):
    """Resources with their numbers of ranks and threads."""

    ranks: int = field()
    threads: int = field()


@dataclass(frozen=True)
class Measure:
    """How a run is measured.

    `kind`: train, or eval, which holds weights alone and reports loss and perplexity over held-out data.
    `warmup_steps`: steps left out of the measurements. `steps`: the measured steps after them; null trains to the end
    that the group train gives. `validation_batches`: batches of the validation that follows, for each rank; null is all
    held-out data. With kind eval a step is the forward of one batch of each rank, `steps` is
    their largest number, and the warm-up repeats the first of them. `rounds`: the measured steps are divided into this
    many rounds, or one for each if they are fewer, and the points of a sweep take turns; fewer than 3 rounds do not
    rank speeds. `min_s`: further rounds follow until all counted steps took this many seconds together; they decide
    the speed only, not the losses. `profile`: two more steps follow the measured ones and are profiled, which shows
    where time and memory go. `reference`: a sweep of several engines gets plain PyTorch in one process, with which the
    work of the others is compared."""

    kind: MeasureKind = MeasureKind.train
    warmup_steps: int = 5
    steps: int | None = 25
    validation_batches: int | None = 2
    rounds: int = 1
    min_s: float = 0.0
    profile: bool = False
    reference: bool = True

    def __post_init__(self) -> None:
        limits = Limits(vars(self), "measure")
        limits.at_least(0, warmup_steps=0, validation_batches=0, min_s=0)
        limits.at_least(1, steps=25, rounds=1)
        if self.rounds <= 1:
            limits.must("min_s", lambda value: value == 0, "0 without several measure.rounds, to which it adds", 0)
        if self.steps is None:
            limits.must("rounds", lambda value: value <= 1, "1 without measure.steps: training takes no turns", 1)
            limits.must("profile", lambda value: not value, "false without measure.steps: it adds two steps", False)
        if self.kind is MeasureKind.eval:
            limits.must(
                "rounds", lambda value: value <= 1, "1 with measure.kind=eval, which measures no speed to rank", 1
            )
            limits.must("profile", lambda value: not value, "false with measure.kind=eval: training is profiled", False)
            if self.steps is None:
                limits.refuse(
                    "measure.kind=eval needs measure.steps, its largest number of batches", "null", "measure.steps=16"
                )
        limits.conclude()


@dataclass(frozen=True)
class Train:
    """How long measure=train trains, and what it does besides.

    `max_steps`, or `epochs`: passes over the training part of the data; the last step is filled up from the next pass.
    `eval_every`: validate after every this many steps (null: only at the end). `keep_best`: with checkpoint=sharded,
    save after a validation with the lowest loss so far, and keep that checkpoint beside the last ones. `examples`:
    held-out samples that the trained model continues at the end, greedily, by up to `new_tokens` tokens.
    """

    max_steps: int | None = None
    epochs: float | None = None
    eval_every: int | None = None
    keep_best: bool = True
    examples: int = 2
    new_tokens: int = 32

    def __post_init__(self) -> None:
        limits = Limits(vars(self), "train")
        limits.at_least(1, max_steps=None, eval_every=None, new_tokens=32)
        limits.at_least(0, examples=2)
        limits.must("epochs", lambda value: 0 < value <= 1e6, "above 0 and at most a million", 1)
        limits.conclude()


@dataclass(frozen=True)
class Tracking:
    """Where a run is tracked.

    `uri`: null = an SQLite file next to the outputs. `experiment`: the name of an MLflow experiment; null = one for
    each sweep, and for single runs one named by the model.
    """

    kind: TrackingKind = TrackingKind.mlflow
    uri: str | None = None
    experiment: str | None = None


@dataclass(frozen=True, kw_only=True)
class AskedConfig:
    """The configuration of one point as a command line gives it: ranks, threads, batch and device may be open."""

    seed: int = 1234
    output: str = "outputs"
    engine: EngineChoice = field(default_factory=EngineChoice)
    zero: Zero = field(default_factory=Zero)
    precision: Precision = field(default_factory=Precision)
    offload: Offload = field(default_factory=Offload)
    batch: Batch = field(default_factory=Batch)
    model: Model
    adapter: Adapter = field(default_factory=Adapter)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    scheduler: Scheduler = field(default_factory=Scheduler)
    recompute: RecomputeRule = field(default_factory=RecomputeRule)
    loss: Loss = field(default_factory=Loss)
    parallel: Parallel = field(default_factory=Parallel)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    resources: Resources = field(default_factory=Resources)
    comm: Comm = field(default_factory=Comm)
    hardware: GpuNode = field(default_factory=GpuNode)
    cluster: Cluster = field(default_factory=Cluster)
    measure: Measure = field(default_factory=Measure)
    train: Train = field(default_factory=Train)
    tracking: Tracking = field(default_factory=Tracking)

    def __post_init__(self) -> None:
        root_limits(vars(self)).conclude()

    @functools.cached_property
    def as_plain(self) -> Mapping[str, Any]:
        """The plain data of `to_dict`, made once. The caller must not change it."""
        return to_dict(self)


@dataclass(frozen=True, kw_only=True)
class RunConfig(AskedConfig):
    """The configuration of one point in which nothing is open: rules.resolve() makes it of an AskedConfig, and records
    hold it."""

    batch: ResolvedBatch
    resources: ResolvedResources

    @property
    def trains_to_the_end(self) -> bool:
        """Whether the run trains until `train.max_steps` or `train.epochs`, not for a number of measured steps."""
        return self.measure.steps is None

    def steps(self, train_samples: int | None = None) -> int | None:
        """All steps of the run, with those of the warm-up. Epochs are counted in steps of the
        data, which has `train_samples` training samples: None where it was not read."""
        if self.measure.steps is not None:
            return self.measure.warmup_steps + self.measure.steps
        if self.train.epochs is None or self.train.max_steps is not None:
            return self.train.max_steps
        if train_samples is None:
            return None
        samples = round(self.train.epochs * train_samples, 6)  # without the rounding, 0.1 x 30 samples are more than 3
        return max(1, math.ceil(samples / self.batch.global_size))

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.resources.ranks

    @property
    def data_ranks(self) -> int:
        """The number of ranks that ZeRO shards over."""
        return self.parallel.data_ranks(self.ranks)

    @property
    def batch_ranks(self) -> int:
        """The number of ranks with different batches."""
        return self.parallel.batch_ranks(self.ranks)


def root_limits(values: Mapping[str, Any]) -> Limits:
    """Checks the values that belong to no group; those out of range are in `broken` of the result."""
    limits = Limits(values)
    limits.must("seed", lambda value: 0 <= value < 2**32, "from 0 to 2^32 - 1", 1234)
    limits.must("output", bool, "the name of a folder", "outputs")
    return limits


def to_dict(config: AskedConfig) -> dict[str, Any]:
    """The configuration as plain data for JSON; enums become their names."""
    return plain(config)


def from_dict(data: Mapping[str, Any]) -> RunConfig:
    """The inverse of to_dict. Raises one ConfigError with every unknown key, wrong type and bad value."""
    config: RunConfig
    config, broken = build(RunConfig, data)
    if broken:
        raise ConfigError(broken)
    return config
