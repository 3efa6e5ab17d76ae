"""The kernel variants that a runtime's first steps launch have all been compiled when it was made.

The Triton operations take the place of the compiled C++ ones on CPU tensors; Triton computes the key of each launch,
under which it would compile a variant, and compiles and starts nothing.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import pytest
import torch
from harness.attack_counts import Tally
from harness.cubins import variants
from harness.models import TinySpec, TinyTransformer, token_loss_sum
from harness.ranks import run_alone

from zero_runtime.kernels import ops
from zero_runtime.optim import rehearsal
from zero_runtime.optim.configs import (
    AdamConfig,
    AdamW8bitConfig,
    AdamWConfig,
    LambConfig,
    LionConfig,
    OptimizerConfig,
    SgdConfig,
    TorchConfig,
)
from zero_runtime.plan import ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.runtime import RuntimeSettings, ZeroRuntime

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (pip install '.[dev]' on Linux)"
)

WORLD = 8
STAGES = (0, 2, 3)
PRECISIONS = {
    "fp32": MixedPrecision(),
    "bf16": MixedPrecision("bf16"),
    "bf16 reduced in bf16": MixedPrecision("bf16", reduce="bf16"),
    "fp16": MixedPrecision("fp16"),
}
OPTIMIZERS: dict[str, OptimizerConfig] = {
    "adamw": AdamWConfig(),
    "adam": AdamConfig(weight_decay=0.1),
    "adamw8bit": AdamW8bitConfig(),
    "sgd": SgdConfig(momentum=0.9, nesterov=True),
    "plain sgd": SgdConfig(),
    "lion": LionConfig(),
    "lamb": LambConfig(),
    "torch": TorchConfig("Adagrad"),
}
# Odd sizes, so that parameters begin anywhere; and sizes as those of real models.
MODELS = {"odd": TinySpec(tied=True), "real": TinySpec(vocab=256, width=256)}


class Cell(NamedTuple):
    stage: int
    precision: str
    optimizer: str
    model: str
    micro_batches: int


CELLS = [Cell(*one) for one in product(STAGES, PRECISIONS, OPTIMIZERS, MODELS, (1, 2))]
CUT = [Cell(3, "bf16", "adamw", "real", 1), Cell(0, "fp32", "lamb", "odd", 2), Cell(2, "fp16", "sgd", "odd", 2)]


@pytest.mark.parametrize("cells", [CUT, pytest.param(CELLS, marks=pytest.mark.full)], ids=["cut", "all"])
def test_the_first_steps_launch_only_variants_that_were_compiled_before(cells: list[Cell], checked: Tally) -> None:
    found = run_alone(launched_by, cells)
    assert len(found) == len(cells)
    for cell, (prepared, launched) in zip(cells, found, strict=True):
        checked("variants of kernels that were compiled before the first step", cells=1, variants=len(launched))
        assert launched, cell
        assert launched <= prepared, f"{cell}: compiled in a step: {launched - prepared}"


def test_without_a_rehearsal_the_check_reports_them() -> None:
    ((prepared, launched),) = run_alone(launched_by, CUT[:1], False)
    assert not prepared
    assert launched


Variants = set[tuple[str, str]]


def launched_by(cells: Sequence[Cell], rehearses: bool = True) -> list[tuple[Variants, Variants]]:
    """By cell: the variants that were compiled while the runtime was made, and those of its first two steps."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from zero_runtime.kernels.triton import operations

    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=WORLD)
    ops.__dict__.update(_ops=operations, compiles_variants=lambda _device: True)
    if not rehearses:
        rehearsal.__dict__.update(rehearse=lambda *_: None)
    found = []
    for cell in cells:
        with variants() as launched:
            runtime = build(cell)
            prepared = set(launched)
            launched.clear()
            for _ in range(2):
                train(runtime, cell)
            runtime.close()
        found.append((prepared, set(launched)))
    return found


def build(cell: Cell) -> ZeroRuntime:
    """The one host read of a step returns ones: nothing is computed, so the numbers mean nothing."""
    settings = RuntimeSettings(micro_batches=cell.micro_batches, read_host=lambda numbers: [1.0] * numbers.numel())
    model, plan = TinyTransformer(MODELS[cell.model]), ZeroPlan.from_stage(cell.stage)
    config, precision = OPTIMIZERS[cell.optimizer], PRECISIONS[cell.precision]
    return ZeroRuntime(model, plan, precision, config, settings, torch.device("cpu"))


def train(runtime: ZeroRuntime, cell: Cell) -> None:
    ids = torch.zeros((2, 16), dtype=torch.int64)
    for _ in range(cell.micro_batches):
        runtime.backward(token_loss_sum(runtime.model, ids, ids))
    runtime.step(1e-3)
