"""Rows: a runtime of a harness model on the virtual GPU, run for some steps, and what was recorded of the last one.

The harness sets no current device: the runtime has to. Imported in the child process alone (child.py), because it
replaces parts of torch.
"""

from __future__ import annotations

import ctypes
import gc
import math
import tempfile
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from harness.models import TinySpec, TinyTransformer, token_loss_sum
from harness.virtual_gpu import devices as stand_ins
from harness.virtual_gpu import nccl, threads
from harness.virtual_gpu.devices import Devices
from harness.virtual_gpu.machine import Machine
from harness.virtual_gpu.recorder import Recorder, extent
from harness.virtual_gpu.row import SEQUENCES, Row
from zero_runtime.accounting import unit_sizes
from zero_runtime.activations.recompute import Recomputation
from zero_runtime.activations.rule import RecomputeRule
from zero_runtime.dtype_audit import DTypeAudit
from zero_runtime.dtype_rules import AskedDTypes
from zero_runtime.offload.scratch_file import ScratchFile
from zero_runtime.offload_plan import OffloadPlan, ScratchSettings, Tier
from zero_runtime.optim.configs import (
    AdamW8bitConfig,
    AdamWConfig,
    LambConfig,
    LionConfig,
    OptimizerConfig,
    SgdConfig,
    TorchConfig,
)
from zero_runtime.optim.loss_scaler import UNSCALED, LossScaleRule
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.predict.memory.activation_count import LinearTrace, Trace
from zero_runtime.predict.memory.activation_trace import trace_step
from zero_runtime.predict.memory.counted_unit import CountRules
from zero_runtime.predict.memory.step_memory import StepMemory, StepPeaks, replay_states
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime
from zero_runtime.unit_parameters import UnitParameters
from zero_runtime.unit_planner import UnitRules

FILE = -1  # the storage that stands for a rank's scratch file
DEVICE = 3  # not 0, which is every thread's device before it chooses another
LR = 1e-3
OPTIMIZERS: dict[str, OptimizerConfig] = {
    "adamw": AdamWConfig(),
    "adamw8bit": AdamW8bitConfig(),
    "lamb": LambConfig(),
    "lion": LionConfig(),
    "sgd": SgdConfig(momentum=0.9),
    "torch": TorchConfig(class_name="Adagrad"),
}
TIERS = {  # where the parameter shards and the optimizer's states are stored
    "none": (Tier.DEVICE, Tier.DEVICE),
    "activations": (Tier.DEVICE, Tier.DEVICE),
    "optimizer": (Tier.DEVICE, Tier.HOST),
    "params": (Tier.HOST, Tier.DEVICE),
    "both": (Tier.HOST, Tier.HOST),
    "optimizer nvme": (Tier.DEVICE, Tier.NVME),
    "both nvme": (Tier.NVME, Tier.NVME),
    "params cpu optimizer nvme": (Tier.HOST, Tier.NVME),
}


class Bench:
    """One rank's virtual GPU with everything installed.

    gathers: of full parameters so far. overflows: whether the gradients of the current step do.
    """

    gathers = 0
    overflows = False

    def __init__(self, guard: ctypes.CDLL, row: Row, without: Collection[str]) -> None:
        self.machine = Machine(without=frozenset(without))
        self.turns = threads.Turns(self.machine, lambda: self.recorder.in_thread())
        self.turns.late = row.late
        self.devices = Devices(guard, self.machine, self.turns, DEVICE)
        self.recorder = Recorder(self.devices)
        stand_ins.install(self.devices)
        threads.install(self.turns, "zero_runtime")
        self._record_files()
        self._count_gathers()
        self.log = nccl.join(self.devices, self.recorder.storages, row.rank, row.world)
        self.device = torch.device("cuda", DEVICE)

    def _record_files(self) -> None:
        """Record what transfers to and from a scratch file access: the host's memory and the file."""

        def recorded(transfer: Callable[..., None], *, reads: bool) -> Callable[..., None]:
            def transferring(file: ScratchFile, offset: int, block: torch.Tensor, what: str) -> None:
                memory = [(block.untyped_storage()._cdata, extent(block))]
                inside = [(FILE, (offset, offset + block.nbytes))]
                given = (inside, memory) if reads else (memory, inside)
                self.machine.act(self.turns.actor, "read from file" if reads else "write to file", *given)
                transfer(file, offset, block, what)

            return transferring

        ScratchFile._read_block = recorded(ScratchFile._read_block, reads=True)  # type: ignore[method-assign]
        ScratchFile._write_block = recorded(ScratchFile._write_block, reads=False)  # type: ignore[method-assign]

    def _count_gathers(self) -> None:
        """Of full parameters, also in a shard group of one rank, where no collective is issued."""
        start = UnitParameters.start_gather

        def counting(parameters: UnitParameters) -> None:
            self.gathers += 1
            start(parameters)

        UnitParameters.start_gather = counting  # type: ignore[method-assign]

    def on_device(self, model: nn.Module) -> nn.Module:
        """The model with fake parameters and buffers on the device; tied parameters stay tied."""
        made: dict[int, nn.Parameter] = {}
        for module in model.modules():
            for name, param in list(module._parameters.items()):
                if param is not None:
                    if id(param) not in made:
                        empty = torch.empty(param.shape, dtype=param.dtype, device=self.device)
                        made[id(param)] = nn.Parameter(empty, requires_grad=param.requires_grad)
                    module._parameters[name] = made[id(param)]
        return model

    def read_host(self, numbers: torch.Tensor) -> list[float]:
        """What Tensor.tolist does, which refuses fake tensors. The second number is the norm of the gradients."""
        values = numbers.to("cpu").tolist()
        if self.overflows:
            values[1] = math.inf
        return values


def run(guard: ctypes.CDLL, row: Row, without: Collection[str] = ()) -> dict[str, Any]:
    """Run the row's steps; returns what was recorded, as JSON values. without: see Machine."""
    gc.disable()  # a collection would free cycles at unpredictable times
    trace = _traced(row) if row.traced else None
    bench = Bench(guard, row, without)
    with tempfile.TemporaryDirectory() as scratch, bench.recorder:
        runtime, recomputation = _build(bench, row, Path(scratch))
        found: dict[str, Any] = {}
        for step in range(row.steps):
            last = step == row.steps - 1
            bench.overflows = row.skips and step == 1
            audit = DTypeAudit(runtime, _asked(row)) if last else None
            if last:
                runtime.reset_ledger()
                found = _begin(bench)
            _step(bench, row, runtime, audit or nullcontext())
            if audit is not None:
                _end(bench, runtime, found)
                found["dtypes"] = audit.differences(runtime.reset_ledger())
                found["predicted"] = None if trace is None else _predicted(row, trace, runtime)
        if recomputation is not None:
            recomputation.remove()
        runtime.close()
        del runtime, recomputation
    dist.destroy_process_group()
    return _report(bench, found)


def _model(row: Row) -> TinyTransformer:
    return TinyTransformer(
        TinySpec(vocab=row.vocab, width=row.width, blocks=row.blocks, tied=row.tied, frozen=row.frozen)
    )


def _rule(row: Row) -> RecomputeRule:
    return RecomputeRule(row.recompute, offload="cpu" if row.offload == "activations" else "none")


def _traced(row: Row) -> Trace:
    """The trace of a micro-batch, made before anything is installed."""
    with torch.device("meta"):
        model = _model(row)
    if row.embedding_last:
        model._modules["embed"] = model._modules.pop("embed")
    ids = torch.zeros((SEQUENCES, row.tokens), dtype=torch.int64)
    rules = UnitRules(MixedPrecision(row.precision))
    return trace_step(model, rules, _rule(row), [ids, ids.clone()], token_loss_sum, on_cuda=True)


def _predicted(row: Row, trace: Trace, runtime: ZeroRuntime) -> int:
    """The predicted peak of a step's tensors in bytes, without the inputs."""
    collectives, plan = runtime.collectives, runtime.plan
    state_bytes = runtime.optimizer.config.state_bytes
    replicas = collectives.replica_count
    rules = CountRules(
        plan,
        collectives.shard_count,
        replicas,
        row.micro_batches,
        state_bytes,
        by_messages=False,
        params_in_file=runtime.settings.offload.params is Tier.NVME,
        reduces_at_boundary=row.no_sync,
    )
    units = list(zip(unit_sizes(runtime), (unit.precision for unit in runtime.units), strict=True))
    linear = LinearTrace.of_one(SEQUENCES, trace)
    states = replay_states(trace, units, rules, prefetch=row.prefetch)
    return StepMemory(linear, StepPeaks.of(linear, states)).peak(SEQUENCES).total


def _build(bench: Bench, row: Row, scratch: Path) -> tuple[ZeroRuntime, Recomputation | None]:
    model = bench.on_device(_model(row))
    if row.embedding_last:
        embedding = model._modules.pop("embed")
        model._modules["embed"] = embedding
    file = ScratchSettings(scratch, block_bytes=8192) if Tier.NVME in TIERS[row.offload] else None
    offload = OffloadPlan(*TIERS[row.offload], scratch=file)
    rule = _rule(row)
    recomputation = None if rule == RecomputeRule() else Recomputation(model, rule, bench.device)
    settings = RuntimeSettings(
        clip_norm=2.0,
        read_host=bench.read_host,
        micro_batches=row.micro_batches,
        prefetch=row.prefetch,
        offload=offload,
        loss_scale=LossScaleRule(initial_power=8) if row.precision == "fp16" else UNSCALED,
    )
    plan = ZeroPlan.from_stage(row.stage, shard_ranks=row.shard_ranks, outer_sharding=row.outer_sharding)
    precision = MixedPrecision(row.precision)
    return ZeroRuntime(model, plan, precision, OPTIMIZERS[row.optimizer], settings, bench.device), recomputation


def _step(bench: Bench, row: Row, runtime: ZeroRuntime, around: AbstractContextManager[Any]) -> None:
    """around: a context for all forwards and backwards."""
    with around:
        for micro in range(row.micro_batches):
            ids = torch.zeros((SEQUENCES, row.tokens), dtype=torch.int64, device=bench.device)
            tokens = runtime.sum_over_ranks(ids.numel())
            loss = token_loss_sum(runtime.model, ids, ids) / tokens
            is_last = micro == row.micro_batches - 1
            with runtime.no_sync() if row.no_sync and not is_last else nullcontext():
                runtime.backward(loss)
            del loss
    runtime.step(LR)


def _asked(row: Row) -> AskedDTypes:
    return AskedDTypes(MixedPrecision(row.precision), row.micro_batches, OPTIMIZERS[row.optimizer].held_states)


def _begin(bench: Bench) -> dict[str, Any]:
    bench.machine.syncs.clear()
    bench.devices.allocator.begin()
    bench.gathers = 0
    devices = bench.devices
    return {"first_issued": len(bench.log), "events_before": devices.events_made, "alive_before": devices.events_alive}


def _end(bench: Bench, runtime: ZeroRuntime, found: dict[str, Any]) -> None:
    found["gathers"] = bench.gathers
    found["device"] = bench.device.index
    found["trained_units"] = sum(unit.trainable for unit in runtime.units)
    found["syncs"] = [[sync.kind, sync.place, sync.thread] for sync in bench.machine.syncs]
    found["peaks"] = asdict(bench.devices.allocator.peaks())
    found["events"] = bench.devices.events_made - found.pop("events_before")
    found["events_alive"] = bench.devices.events_alive
    found["issued"] = [astuple(event) for event in bench.log[found.pop("first_issued") :]]


def _report(bench: Bench, found: dict[str, Any]) -> dict[str, Any]:
    return {
        **found,
        "disorders": [asdict(pair) for pair in bench.machine.disorders],
        "elsewhere": dict(Counter(bench.devices.launched_elsewhere)),
        "contexts": sorted(bench.devices.contexts),
        "waits": sorted(bench.machine.waits),
        "operations": bench.machine.operations,
        "checked": bench.machine.checked,
        "made": [event.group for event in bench.log if event.kind == "make"],
        "destroyed": [event.group for event in bench.log if event.kind == "destroy"],
    }
