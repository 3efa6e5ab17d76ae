"""Builds the runtime's objects from a resolved RunConfig. Only this module maps between the names of the two."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from orchestrator.config.schema import AdapterKind, DataKind, RunConfig, Tokenizer
from orchestrator.config.state_groups import Offload
from orchestrator.launch.environment import set_kernel_cache
from orchestrator.machine.energy import EnergyCounter, gpu_counters, package_counters
from orchestrator.plan.tensor_messages import TensorMessages
from orchestrator.records.run_record import scratch_path
from orchestrator.worker.sliced import check_sequences, messages_of, slices_of, tensor_parallel
from orchestrator.workloads.data import TokenData, load_data
from orchestrator.workloads.models import build_deferred_model
from zero_runtime.activations.recompute import Recomputation
from zero_runtime.checkpoint.hugging_face.source import WeightsFolder
from zero_runtime.collectives import Collectives
from zero_runtime.dtypes import short_name
from zero_runtime.initial_values import Initialise
from zero_runtime.integrations.pretrained import weights_of
from zero_runtime.kernels.registration import prepare
from zero_runtime.memory.dtype_rules import AskedDTypes
from zero_runtime.numa import bind_to_gpu
from zero_runtime.offload.plan import OffloadPlan, Tier
from zero_runtime.optim.configs import MuonConfig
from zero_runtime.optim.loss_scaler import UNSCALED
from zero_runtime.own_device import device_index, make_current
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime
from zero_runtime.sequence_parallel.division import SequenceParallel
from zero_runtime.unit_planner import UnitRules
from zero_runtime.watch.watch import RankWatch


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


def energy_counters(device: torch.device) -> list[EnergyCounter]:
    """The counters of energy that a rank with this device can read."""
    if device.type != "cuda":
        return package_counters()
    return gpu_counters(f"GPU-{torch.cuda.get_device_properties(device).uuid}")


def build_data(config: RunConfig) -> TokenData:
    encode = encode_pairs = None
    if config.data.tokenizer is Tokenizer.model:
        assert config.model.path is not None
        from orchestrator.workloads import tokenizer  # here: predictions do not wait for its libraries

        if config.data.kind is DataKind.pairs:
            encode_pairs = tokenizer.pair_encoder(config.model.path)
        else:
            encode = tokenizer.load_tokenizer(config.model.path)
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
    check_sequences(config, model)
    return UnitRules(
        precision.mixed,
        config.zero.unit_numel,
        tuple(precision.keep_dtype),
        config.optimizer.rule.matrix_patterns,
        slices_of(config, model),
    )


class TrainingSetup(NamedTuple):
    """The runtime that trains the model, the recomputation of the model's blocks, and the messages of its slices."""

    runtime: ZeroRuntime
    recomputation: Recomputation
    tensor: TensorMessages


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
    model, initialise = build_deferred(config)
    tensor = messages_of(config, model)
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
        tensor_parallel=tensor_parallel(config),
        sequence_parallel=SequenceParallel(config.parallel.sp),
    )
    with ExitStack() as stack:
        if config.model.path is not None:
            folder = stack.enter_context(WeightsFolder(config.model.path))
            settings = replace(settings, weights=weights_of(folder, model))
        runtime = ZeroRuntime(
            model,
            config.zero.plan,
            precision.mixed,
            config.optimizer.rule if trains else None,
            settings,
            device,
        )
    _compile_kernels(config, device)
    return TrainingSetup(runtime, recomputation, tensor)


def asked_dtypes(config: RunConfig, runtime: ZeroRuntime) -> AskedDTypes:
    """The dtypes that the configuration asks for in the runtime's units."""
    return AskedDTypes(
        config.precision.mixed,
        config.batch.accumulation,
        config.optimizer.rule.held_states,
        tuple(config.precision.keep_dtype),
        {name: short_name(dtype) for name, dtype in runtime.given_dtypes.items()},
        whole=config.optimizer.rule.ns_dtype if isinstance(config.optimizer.rule, MuonConfig) else None,
        wire=config.zero.wire,
        plan=config.zero.plan,
    )


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
    if adapter.kind is AdapterKind.none:
        return model, None
    from orchestrator.workloads import adapters  # PEFT is an extra

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
