"""Builds the runtime's objects from a resolved RunConfig. Only this module maps between the names of the two."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from orchestrator import wings
from orchestrator.config.pretrained import tokenizer_folder
from orchestrator.config.schema import AdapterKind, DataKind, RunConfig, Tokenizer
from orchestrator.config.state_groups import Offload
from orchestrator.launch.environment import set_kernel_cache
from orchestrator.launch.rank import RankInfo, RankRecord
from orchestrator.records.run_record import AttemptPaths, scratch_path
from orchestrator.worker.accounts import Accounts, OwnAccounts
from orchestrator.worker.measure import begin_peak
from orchestrator.workloads.data import TokenData, load_data
from orchestrator.workloads.models import build_deferred_model
from zero_runtime.activations.recompute import Recomputation
from zero_runtime.census import take_census
from zero_runtime.collectives import Collectives
from zero_runtime.initial_values import Initialise
from zero_runtime.kernels.registration import prepare
from zero_runtime.numa import bind_to_gpu
from zero_runtime.offload_plan import OffloadPlan, Tier
from zero_runtime.optim.loss_scaler import UNSCALED
from zero_runtime.own_device import device_index, make_current
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime
from zero_runtime.slices import WHOLE
from zero_runtime.unit_planner import UnitRules
from zero_runtime.watch.failure import is_out_of_memory, memory_error
from zero_runtime.watch.watch import RankWatch, WatchSettings
from zero_runtime.wings import READ_WEIGHTS_FOLDER, load
from zero_runtime.world import WorldSettings, join_world, leave_world


def prepare_process(config: RunConfig, local_rank: int) -> torch.device:
    """Sets this rank's threads, processors, seeds and cache of kernels. Returns its device, which is current.

    PlanError if it has no GPU.
    """
    torch.set_num_threads(config.resources.threads)
    torch.manual_seed(config.seed)
    if config.resources.device != "cuda":
        return torch.device("cpu")
    torch.set_float32_matmul_precision("high" if config.precision.tf32 else "highest")
    set_kernel_cache(os.environ)
    device = make_current(torch.device("cuda", device_index(local_rank, torch.cuda.device_count())))
    bind_to_gpu(device, config.resources.threads)
    return device


@contextmanager
def world_of(attempt: AttemptPaths, config: RunConfig, rank: RankInfo, device: torch.device) -> Iterator[RankWatch]:
    """Within it, this rank is in the process group of the attempt's ranks; gives the watch over them."""
    settings = WorldSettings(
        watch=WatchSettings(stuck_s=config.resources.stuck_s),
        on_end=rank.on_end or RankRecord(attempt, rank.rank).write_error,
        comm=config.comm.kind,
    )
    with join_world(rank.meeting, rank.rank, rank.world, device, settings) as watch:
        yield watch
    leave_world()  # a rank that failed must not: it could wait here forever and never record its error


@contextmanager
def with_memory(accounts: Accounts, watch: RankWatch, rank: int) -> Iterator[None]:
    """Adds the memory held at the time to an out of memory error."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        position, _ = watch.journal.read()
        raise memory_error(rank, error, position, asdict(take_census(accounts.held()))) from error


def build_data(config: RunConfig) -> TokenData:
    encode = encode_pairs = None
    if config.data.tokenizer is Tokenizer.model:
        tokenizer, folder = wings.load(wings.TOKENIZER), tokenizer_folder(config.model.path, config.model.adapter)
        if config.data.kind is DataKind.pairs:
            encode_pairs = tokenizer.pair_encoder(folder)
        else:
            encode = tokenizer.load_tokenizer(folder)
    if wings.load(wings.KINDS).has_own_batches(config):
        other: TokenData = wings.load(wings.KIND_DATA)(config, encode, encode_pairs)
        return other
    return load_data(
        str(config.data.kind),
        config.data.path,
        seq=config.batch.seq,
        seed=config.seed,
        vocab_size=int(config.model.config["vocab_size"]),
        validation_fraction=config.data.validation_fraction,
        encode=encode,
        encode_pairs=encode_pairs,
    )


def unit_rules(config: RunConfig, model: nn.Module) -> UnitRules:
    """The settings that decide the units of the full model. PlanError if its layers or sequences are not divided."""
    precision = config.precision
    divided = config.parallel.group > 1
    return UnitRules(
        precision.mixed,
        config.zero.unit_numel,
        tuple(precision.keep_dtype),
        config.optimizer.rule.matrix_patterns,
        wings.load(wings.DIVIDED).slices_of(config, model) if divided else WHOLE,
    )


class TrainingSetup(NamedTuple):
    """The engine that trains the model, what is counted of it, and the recomputation of the model's blocks."""

    runtime: Any  # a ZeroRuntime, or another engine with what worker/ uses of it
    accounts: Accounts
    recomputation: Recomputation


def build_engine(
    config: RunConfig, device: torch.device, watch: RankWatch, stop_asked: Callable[[], bool] | None = None
) -> TrainingSetup:
    """Builds the model and the engine that trains it. Needs the process group."""
    build = build_runtime if config.engine.is_own else wings.load(wings.BUILD_ENGINE)
    built: TrainingSetup = build(config, device, watch, stop_asked)
    return built


def build_runtime(
    config: RunConfig,
    device: torch.device,
    watch: RankWatch,
    stop_asked: Callable[[], bool] | None = None,
    *,
    trains: bool = True,
) -> TrainingSetup:
    """Builds the model without weights and the runtime, which initializes or reads the weights unit by unit.

    Needs the process group. `trains`: if False, the runtime is for inference, without an optimizer.
    """
    # The model has no memory yet: the runtime makes each rank's shards, so that no rank ever holds all of it.
    model, initialise = build_deferred(config)
    begin_peak()
    recomputation = Recomputation(model, config.recompute, device)
    precision = config.precision
    settings = RuntimeSettings(
        micro_batches=config.batch.accumulation,
        clip_norm=config.optimizer.clip_norm,
        prefetch=config.zero.prefetch,
        loss_scale=precision.scale if precision.scales_loss else UNSCALED,
        watch=watch,
        unit_numel=config.zero.unit_numel,
        keep_dtype=tuple(precision.keep_dtype),
        seed=config.seed,
        initialise=initialise,
        offload=offload_plan(config.offload, config.output),
        stop_asked=stop_asked,
        wire=config.zero.wire,
        **(wings.load(wings.DIVIDED).divisions_of(config) if config.parallel.group > 1 else {}),
    )
    with ExitStack() as stack:  # a folder of weights stays open until the runtime has read this rank's shards
        if config.model.path is not None:
            weights = stack.enter_context(load(READ_WEIGHTS_FOLDER)(config.model.path, model, config.model.adapter))
            settings = replace(settings, weights=weights)
        runtime = ZeroRuntime(
            model,
            config.zero.plan,
            precision.mixed,
            config.optimizer.rule if trains else None,
            settings,
            device,
        )
    _compile_kernels(config, device)
    return TrainingSetup(runtime, OwnAccounts(config, runtime), recomputation)


def _compile_kernels(config: RunConfig, device: torch.device) -> None:
    """Compiles kernels during startup, where ranks may be slow; in the first step a compiling rank would look hung."""
    on_host = config.offload.optimizer is not Tier.DEVICE or config.offload.params is not Tier.DEVICE
    for one in {device.type, "cpu"} if on_host else {device.type}:
        prepare(torch.device(one))


def build_deferred(config: RunConfig) -> tuple[nn.Module, Initialise | None]:
    """The model on the meta device, with its adapters if configured, and the rule for their initial values."""
    settings, adapter = config.model, config.adapter
    assert settings.model_type is not None
    model = build_deferred_model(settings.model_type, settings.config, as_saved=settings.path is not None)
    for is_asked, change in ((config.data.packing, wings.PACKS), (config.precision.keep_dtype, wings.CASTS)):
        if is_asked:
            wings.load(change)(model, config.precision)
    if adapter.kind is AdapterKind.none:
        return model, None
    adapters = wings.load(wings.ADAPTERS)
    wrapped = adapters.add_lora(model, adapters.lora_config(adapter.rank, adapter.alpha, adapter.targets))
    return wrapped.train(), adapters.first_values(wrapped)


def offload_plan(offload: Offload, output: str) -> OffloadPlan:
    """The plan. Creates the scratch folder of `output`; any other must exist."""
    if offload.uses_nvme:
        assert offload.folder is not None
        if Path(offload.folder) == scratch_path(output):
            Path(offload.folder).mkdir(parents=True, exist_ok=True)
    return offload.plan()


def refuse_different_data(collectives: Collectives, data_hash: str) -> None:
    """Raises ValueError if ranks read different data, which a loss would not reveal. Every rank must call it."""
    hashes = collectives.gather_objects(data_hash)
    if len(set(hashes)) > 1:
        raise ValueError(
            f"data: expected every rank to read the same tokens, found the hashes {hashes} by rank; give a data.path "
            "that is the same on every machine and that nothing writes to"
        )
