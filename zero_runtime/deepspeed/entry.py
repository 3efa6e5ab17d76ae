"""The functions initialize and init_distributed, with DeepSpeed's signatures."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from zero_runtime.deepspeed import checkpointing
from zero_runtime.deepspeed.auto import AutoValues
from zero_runtime.deepspeed.compressed import check_trained
from zero_runtime.deepspeed.config import DropinConfig, read_config
from zero_runtime.deepspeed.engine import Engine, EngineParts
from zero_runtime.deepspeed.engine_optimizer import EngineOptimizer
from zero_runtime.deepspeed.groups import Trained, groups_of_optimizer, groups_of_parameters
from zero_runtime.deepspeed.json_text import load
from zero_runtime.deepspeed.leaf_modules import mark_leaf_modules
from zero_runtime.deepspeed.live_engines import destroy_engine_of
from zero_runtime.deepspeed.loader import training_loader
from zero_runtime.deepspeed.optimizer_section import default_optimizer
from zero_runtime.deepspeed.partition_section import WHERE, patterns_of
from zero_runtime.deepspeed.pending_weights import pending_weights
from zero_runtime.deepspeed.runtime.lr_schedules import of_section
from zero_runtime.deepspeed.schedules import Schedule, client_schedule
from zero_runtime.deepspeed.tp_model import with_tensor_parallel
from zero_runtime.deepspeed.utils.logging import logger
from zero_runtime.errors import PlanError
from zero_runtime.own_device import device_index, make_current
from zero_runtime.parallel.tensor.division import TensorParallel
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime
from zero_runtime.watch.watch import RankWatch
from zero_runtime.world import (
    SHM,
    WorldSettings,
    is_joined,
    join_alone,
    join_world,
    own_rank,
    watch_world,
    world_size,
)

_OWN_NAMES = re.compile(r"\bparallel\.(patterns|tp)\b")
_JSON_NAMES = {"patterns": f"{WHERE}.layer_specs", "tp": "tensor_parallel.autotp_size"}
_TIMEOUT = timedelta(minutes=10)


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta = _TIMEOUT,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Join the process group given by `rank` and `world_size`, or by RANK and WORLD_SIZE as torchrun sets them.

    Without either, joins a group of one rank, which opens no port. Does nothing if there is a process group already or
    `dist_init_required` is False. The backend is NCCL for GPUs. CPU ranks of one machine read each other's memory, or
    use gloo where they may not; with `dist_backend="gloo"` they use gloo, and with "shm" it is an error if they may
    not. Another `dist_backend` causes a warning.
    """
    if is_joined() or dist_init_required is False:
        return
    device = own_device()
    settings = WorldSettings(timeout=timeout, comm=_comm(dist_backend, device))
    env_rank, env_world = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if rank >= 0 and world_size >= 1:
        _join(init_method or "env://", rank, world_size, device, settings)
    elif env_rank is not None and env_world is not None:
        _join(init_method or "env://", int(env_rank), int(env_world), device, settings)
    elif _claims_more_ranks():
        raise PlanError(
            f"init_distributed: expected RANK and WORLD_SIZE together, found RANK={env_rank}, WORLD_SIZE={env_world} "
            f"and OMPI_COMM_WORLD_SIZE={os.environ.get('OMPI_COMM_WORLD_SIZE')}; start the ranks with torchrun"
        )
    else:
        join_alone(device)


# DeepSpeed's published signature, in its order.
def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Mapping[str, Any] | str | Path | None = None,
    mesh_param: Any = None,
    config_params: Mapping[str, Any] | str | Path | None = None,
) -> tuple[Engine, EngineOptimizer, DataLoader[Any] | None, Schedule | None]:
    """Build (engine, optimizer, dataloader, scheduler) for `model`, whose parameters the runtime takes over.

    config: a dict or the path of a DeepSpeed JSON file; `args.deepspeed_config` if it is not given. Its values "auto"
    are filled in from `args`, an object with the names of TrainingArguments, and from the model's hidden size. Joins
    the process group first if this process is in none. The dataloader is None without training_data, the scheduler
    without a schedule. Before the model is changed, raises PlanError for invalid settings, and OffloadError if the disk
    or the host has no room for the offloaded state. A model that an engine has is taken from it, if its weights are
    whole on each rank; the other engine is destroyed. One warning names the settings that have no effect.
    """
    if not isinstance(model, nn.Module):
        raise PlanError(f"initialize: expected model to be a torch.nn.Module, found {type(model).__name__}")
    for name, value in (("mpu", mpu), ("mesh_param", mesh_param)):
        if value is not None:
            raise PlanError(
                f"initialize: {name}: expected none: tensor_parallel.autotp_size makes groups; leave it out"
            )
    init_distributed(dist_init_required=dist_init_required)
    if not is_joined():
        raise PlanError("initialize: expected a process group with dist_init_required=False, found none; make one")
    values = AutoValues.of(args, model)
    source = with_tensor_parallel(model, _source(args, config, config_params))
    source, notes = _without_what_the_call_gives(source, optimizer, lr_scheduler)
    read = read_config(source, world_size(), own_device().type, values)
    if destroy_engine_of(model):
        notes.append("the engine that had the model is destroyed, and the new one begins with its weights")
    trained, told = _train_with(model, optimizer, model_parameters, read)
    if read.schedule is not None:
        fitted, trained, cycled = trained.fitted_to(read.schedule)
        read = replace(read, schedule=fitted)
        told += cycled
    notes += [*told, *trained.notes(), *mark_leaf_modules(model, read.leaf_modules)]
    view = EngineOptimizer(trained)
    schedule = _schedule(lr_scheduler, view, optimizer, read)
    _tell(read, notes + checkpointing.follow(read.given.get("activation_checkpointing")))
    is_named = optimizer is not None or read.optimizer is not None
    is_frozen = not is_named and not any(param.requires_grad for param in model.parameters())
    if is_frozen:
        check_trained(read.wire)
    runtime, watch = _compose(model, read, None if is_frozen else trained, lazy_states=not is_named)
    loader = None
    if training_data is not None:
        loader = training_loader(training_data, collate_fn, read)
    left_out = tuple(trained.left_out.values())
    engine = Engine(EngineParts(runtime, view, schedule, read, get_local_rank(), watch, loader, left_out))
    return engine, view, loader, schedule


def own_device() -> torch.device:
    """This rank's GPU, as `device_index` selects it, made current; the CPU if there is no GPU.

    PlanError if none is left for it.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return make_current(torch.device("cuda", device_index(get_local_rank(), torch.cuda.device_count())))


def get_local_rank() -> int:
    """The rank among those of this machine: LOCAL_RANK, or 0."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def _join(init_method: str, rank: int, world: int, device: torch.device, settings: WorldSettings) -> None:
    # The watch that join_world starts is closed: every engine has a separate one, which ends with the engine.
    join_world(init_method, rank, world, device, settings).close()


def _claims_more_ranks() -> bool:
    """Whether environment variables state that this process is one of several ranks, but not which one.

    Such a process must not train alone.
    """
    sizes = (os.environ.get(name, "1") for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"))
    return "RANK" in os.environ or any(size != "1" for size in sizes)


def _comm(wanted: str | None, device: torch.device) -> str:
    """`WorldSettings.comm` for what the script asks for. A warning if it is not there on this device."""
    here = ("nccl",) if device.type == "cuda" else ("gloo", SHM)
    if wanted not in (None, *here):
        told = f"{' or '.join(here)} on {device}"
        warnings.warn(f"init_distributed: dist_backend={wanted!r} has no effect: {told}", stacklevel=3)
    return wanted if wanted in ("gloo", SHM) and wanted in here else "auto"


def _source(args: Any, config: Any, config_params: Any) -> Any:
    given = [found for found in (config, config_params, getattr(args, "deepspeed_config", None)) if found is not None]
    if len(given) != 1:
        raise PlanError(
            f"initialize: expected one of config, config_params and args.deepspeed_config, found {len(given)} of them"
        )
    return given[0]


def _without_what_the_call_gives(source: Any, optimizer: Any, lr_scheduler: Any) -> tuple[dict[str, Any], list[str]]:
    """The configuration without the sections that the call replaces, as DeepSpeed has it; a note on each."""
    config, notes = load(source), []
    for name, argument, given in (("optimizer", "optimizer", optimizer), ("scheduler", "lr_scheduler", lr_scheduler)):
        if given is not None and config.pop(name, None):
            notes.append(f"{name}: {argument} of the call is used, the section of the configuration is not")
    return config, notes


def _train_with(
    model: nn.Module, optimizer: Any, parameters: Iterable[Any] | None, read: DropinConfig
) -> tuple[Trained, list[str]]:
    """The optimizer and its groups, and notes on the choice for the user."""
    if optimizer is None:
        chosen = read.optimizer or default_optimizer()
        told = f"no optimizer is named: AdamW with lr={chosen.lr}, betas=(0.9, 0.999), weight_decay=0 is used"
        return groups_of_parameters(model, parameters, chosen), [] if read.optimizer else [told]
    if not isinstance(optimizer, torch.optim.Optimizer):
        if not callable(optimizer):
            raise PlanError(f"optimizer: expected a torch optimizer or a callable, found a {type(optimizer).__name__}")
        optimizer = optimizer(model.parameters() if parameters is None else parameters)
    return groups_of_optimizer(model, optimizer), []


def _schedule(given: Any, view: EngineOptimizer, optimizer: Any, read: DropinConfig) -> Schedule | None:
    if given is not None:
        return client_schedule(given, view, optimizer)
    return None if read.schedule is None else of_section(view, read.schedule)


def _compose(
    model: nn.Module, read: DropinConfig, trained: Trained | None, *, lazy_states: bool
) -> tuple[ZeroRuntime, RankWatch | None]:
    """Build the engine's runtime and its watch. `lazy_states`: no optimizer was named, so the engine may be used only
    for inference. `trained`: None if that is certain, because all parameters are frozen."""
    watch = watch_world()
    settings = RuntimeSettings(
        micro_batches=read.batch.accumulation,
        prefetch=read.prefetch,
        clip_norm=read.clip_norm,
        loss_scale=read.loss_scale,
        offload=read.offload,
        watch=watch,
        lazy_states=lazy_states,
        wire=read.wire,
        tensor_parallel=TensorParallel(read.degrees.tensor, tuple(patterns_of(model, read.degrees.specs))),
    )
    left_out = () if trained is None else tuple(trained.left_out.values())
    for param in left_out:
        param.requires_grad_(False)
    if read.fp32_buffers:
        for buffer in model.buffers():
            buffer.data = buffer.data.float() if buffer.is_floating_point() else buffer.data
    try:
        with pending_weights(model) as weights:
            settings = replace(settings, weights=weights)
            optimizer = None if trained is None else trained.config
            runtime = ZeroRuntime(model, read.plan, read.precision, optimizer, settings, own_device())
    except BaseException as error:
        for param in left_out:
            param.requires_grad_(True)
        if watch is not None:
            watch.close(error)  # reports the error to the other ranks
        if type(error) is PlanError:
            raise PlanError(_OWN_NAMES.sub(lambda found: _JSON_NAMES[found[1]], str(error))) from error
        raise
    return runtime, watch


def _tell(read: DropinConfig, notes: list[str]) -> None:
    """On rank 0, the notes and the keys without effect in one warning, and with dump_state the whole configuration,
    which the logger has at INFO otherwise."""
    if own_rank() != 0:
        return
    told = print if read.given.get("dump_state") else logger.info
    told(read.text("DeepSpeedEngine configuration"))
    lines = [*notes, *read.notes, *read.without_effect()]
    if lines:
        warnings.warn("zero_runtime.initialize: " + "; ".join(lines), stacklevel=3)
