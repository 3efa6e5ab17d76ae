"""What the tests on several GPUs let every rank do; on CPU ranks the same functions are rehearsed."""

from __future__ import annotations

import torch
import torch.distributed as dist

from harness.exact import LION, ExactModel, Row, inputs, loss_of, wrong_rows
from zero_runtime.optim.configs import AdamWConfig
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.predict.memory.device_overhead import communicators
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime
from zero_runtime.watch.watch import RankWatch

BAD_RANK, BAD_STEP = 1, 2
TOO_MUCH = 1 << 50  # bytes that no machine has


def exact_rows(watch: RankWatch, device: torch.device, rows: list[Row]) -> list[str]:
    """The rows whose bits are wrong."""
    return wrong_rows(rows, device)


def closed_again_and_again(watch: RankWatch, device: torch.device, runtimes: int) -> int:
    """Trains and closes as many runtimes one after another; each close is called twice. The number that were right."""
    right = 0
    for number in range(runtimes):
        row = Row(number % 4, LION)
        runtime = ZeroRuntime(
            ExactModel(), ZeroPlan.from_stage(row.stage), MixedPrecision(), LION, RuntimeSettings(watch=watch), device
        )
        runtime.backward(loss_of(runtime.model, *(one.to(device) for one in inputs(0, dist.get_rank(), 0))))
        runtime.step(0.25)
        runtime.close()
        runtime.close()
        right += not wrong_rows([row], device)
    return right


def out_of_memory_on_one_rank(watch: RankWatch, device: torch.device) -> None:
    """The bad rank asks for too much memory in a forward, after one good step."""
    model = ExactModel()
    runtime = ZeroRuntime(
        model, ZeroPlan.from_stage(3), MixedPrecision(), AdamWConfig(), RuntimeSettings(watch=watch), device
    )
    for step in range(BAD_STEP + 2):
        if dist.get_rank() == BAD_RANK and step == BAD_STEP:
            torch.empty(TOO_MUCH, dtype=torch.uint8, device=device)
        runtime.backward(loss_of(model, *(one.to(device) for one in inputs(step, dist.get_rank(), 0))))
        runtime.step(1e-3)


def memory_outside_tensors(watch: RankWatch, device: torch.device, plan: ZeroPlan) -> tuple[int, int]:
    """(bytes of this rank's GPU that torch's allocator does not hold, number of communicators), during training.

    Only meaningful if no other process uses the GPU.
    """
    model = ExactModel()
    runtime = ZeroRuntime(model, plan, MixedPrecision(), AdamWConfig(), RuntimeSettings(watch=watch), device)
    for step in range(2):
        runtime.backward(loss_of(model, *(one.to(device) for one in inputs(step, dist.get_rank(), 0))))
        runtime.step(1e-3)
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    outside = total - free - torch.cuda.memory_reserved(device)
    runtime.close()
    return outside, communicators(dist.get_world_size(), runtime.collectives.shard_count)
