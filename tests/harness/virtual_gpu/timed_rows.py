"""Rows with time: a Llama of any size on the virtual GPU, under this runtime or FSDP2. See timeline.py.

Imported after the guard's library is loaded. Replaces parts of torch: one row for each process.
"""

from __future__ import annotations

import ctypes
import gc
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from harness.models import TinySpec, TinyTransformer, token_loss_sum
from harness.virtual_gpu import devices as stand_ins
from harness.virtual_gpu import nccl, threads
from harness.virtual_gpu.devices import Devices
from harness.virtual_gpu.machine import Actor
from harness.virtual_gpu.row import Row
from harness.virtual_gpu.rows import DEVICE, LR, Bench
from harness.virtual_gpu.timeline import TimedMachine, TimedRecorder
from zero_runtime.activations.recompute import Recomputation
from zero_runtime.activations.rule import RecomputeRule
from zero_runtime.optim.configs import AdamWConfig
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.predict.memory.activation_trace import CudaAttention
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime

Passes = Callable[[torch.Tensor], None]  # forward and backward of [1, tokens] ids
STEPS = 2  # the first records the order of the units


class Timed(Protocol):
    """What this file reads of a benchmark's row."""

    engine: str
    world: int
    stage: int
    shard_ranks: int | None
    layers: int | None
    prefetch: int


class Shapes(Protocol):
    config: dict[str, Any]
    recompute: str


class TimedBench(Bench):
    """One rank's virtual GPU that follows time. Helper threads are not replaced: no row has any."""

    def __init__(self, guard: ctypes.CDLL, world: int, rank: int) -> None:
        self.machine = TimedMachine()
        self.turns = threads.Turns(self.machine, lambda: self.recorder.in_thread())
        self.devices = Devices(guard, self.machine, self.turns, DEVICE)
        self.recorder = TimedRecorder(self.devices)
        stand_ins.install(self.devices)
        threads.install(self.turns, "zero_runtime")
        self.log = nccl.join(self.devices, self.recorder.storages, rank, world)
        self.machine.members = members
        self.overflows = False
        self.device = torch.device("cuda", DEVICE)
        F.scaled_dot_product_attention = attention  # for all threads: autograd's recomputes blocks

    def on_device(self, model: nn.Module) -> nn.Module:
        """Buffers too: a Llama has frequencies."""
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=self.device)
        return super().on_device(model)


@cache
def members(stream: Actor) -> tuple[int, ...]:
    """The ranks of the process group whose collectives run on the stream."""
    for group, ranks in dist.distributed_c10d._world.pg_group_ranks.items():
        if isinstance(group, nccl.VirtualGroup) and group._stream.actor == stream:  # the others are of other ranks
            return tuple(ranks)
    raise LookupError(f"no process group has the stream {stream}")


_attention = F.scaled_dot_product_attention


def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Attention as an H100 computes it."""
    with CudaAttention():
        return _attention(*args, **kwargs)


def run_row(guard: ctypes.CDLL, row: Row) -> dict[str, float]:
    """The row's own model, of which `offload` and `recompute` are not used; see `_last`."""
    bench = TimedBench(guard, row.world, row.rank)
    with torch.device("meta"):
        model = TinyTransformer(TinySpec(vocab=row.vocab, width=row.width, blocks=row.blocks))
    with bench.recorder:
        bench.on_device(model)
        runtime = runtime_of(bench, row, model)

        def passes(ids: torch.Tensor) -> None:
            runtime.backward(token_loss_sum(runtime.model, ids, ids) / runtime.sum_over_ranks(ids.numel()))

        return _last(bench, passes, lambda: runtime.step(LR), row.tokens)


def run_llama(guard: ctypes.CDLL, row: Timed, shapes: Shapes, sequence: int) -> dict[str, float]:
    """A Llama under this runtime or FSDP2; see `_last`."""
    from orchestrator.workloads.models import build_deferred_model  # transformers takes seconds to import

    bench = TimedBench(guard, row.world, DEVICE)
    layers = row.layers or shapes.config["num_hidden_layers"]
    model = build_deferred_model("llama", {**shapes.config, "num_hidden_layers": layers})
    with bench.recorder:
        bench.on_device(model)
        engine = ours if row.engine == "ours" else fsdp2
        return _last(bench, *engine(bench, row, model, shapes.recompute), sequence)


def _last(bench: TimedBench, passes: Passes, step: Callable[[], object], sequence: int) -> dict[str, float]:
    """Forward and backward of the last of STEPS steps with one row of tokens, in milliseconds: the time, kernels,
    exposed communication, waits for the host."""
    gc.disable()
    warnings.simplefilter("ignore")
    ids = torch.zeros((1, sequence), dtype=torch.int64, device=bench.device)
    machine, found = bench.machine, {}
    for _ in range(STEPS):
        began = machine.begin()
        passes(ids)
        found = _account(machine, began)
        step()
    return found


def _account(machine: TimedMachine, began: float) -> dict[str, float]:
    seconds = {
        "time": machine.end() - began,
        "kernels": machine.computes,
        "exposed": sum(machine.exposed.values()),
        "host": machine.waits_for_host,
        **{f"exposed_{kind}": value for kind, value in machine.exposed.items()},
        **{f"all_{kind}": value for kind, value in machine.carried.items()},
    }
    return {**{f"{name}_ms": 1e3 * value for name, value in seconds.items()}, "launches": machine.launches}


def ours(bench: TimedBench, row: Timed, model: nn.Module, recompute: str) -> tuple[Passes, Callable[[], object]]:
    from orchestrator.workloads.models import token_losses

    if recompute != "none":
        Recomputation(model, RecomputeRule(recompute), bench.device)  # type: ignore[arg-type]
    runtime = runtime_of(bench, row, model)

    def passes(ids: torch.Tensor) -> None:
        runtime.backward(token_losses(runtime.model, ids, ids) / runtime.sum_over_ranks(ids.numel()))

    return passes, lambda: runtime.step(LR)


def runtime_of(bench: TimedBench, row: Timed | Row, model: nn.Module) -> ZeroRuntime:
    settings = RuntimeSettings(clip_norm=1.0, read_host=bench.read_host, prefetch=row.prefetch)
    plan = ZeroPlan.from_stage(row.stage, shard_ranks=row.shard_ranks)
    return ZeroRuntime(model, plan, MixedPrecision("bf16"), AdamWConfig(), settings, bench.device)


def fsdp2(bench: TimedBench, row: Timed, model: nn.Module, recompute: str) -> tuple[Passes, Callable[[], object]]:
    """FSDP2 as its documentation applies it: each block, then the root; bf16 parameters, fp32 reductions."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from orchestrator.workloads.models import token_losses

    torch.cuda.is_available = lambda: True  # type: ignore[assignment]
    torch.cuda.device_count = lambda: 8  # type: ignore[assignment]
    torch.cuda.set_device(bench.device)
    names = ("shard",) if row.shard_ranks is None else ("replicate", "shard")
    sizes = (row.world,) if row.shard_ranks is None else (row.world // row.shard_ranks, row.shard_ranks)
    mesh = init_device_mesh("cuda", sizes, mesh_dim_names=names)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    blocks = model.model.layers
    for number, block in enumerate(blocks):
        if recompute != "none":
            blocks[number] = block = checkpoint_wrapper(block)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)

    def passes(ids: torch.Tensor) -> None:
        (token_losses(model, ids, ids) / ids.numel()).backward()

    def step() -> None:
        """Its update is left out: torch's optimizers do not run on fake tensors of a device."""
        model.zero_grad()

    return passes, step
