"""Twelve faults of engines that people compare by hand: each is refused, and rows of equal work never are."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from work_runs import STEPS, Run, Work, config_of, entries_of, reference_of, rows

from orchestrator import wings
from orchestrator.wings.engines.ddp import DdpEngine
from orchestrator.wings.engines.equality import verdicts

SHORT_STEPS = 4  # the third update is one that a fault skips
BASE, NO_CLIP, LORA, TIED = (
    Work(accumulation=4),
    Work(accumulation=4, clip_norm=None),
    Work(model="lora"),
    Work(model="tied"),
)


class Bf16States(DdpEngine):
    """All of the model in bf16, so Adam's moments too: OpenTau#177, AReaL#1292."""

    def __init__(self, task: Any) -> None:
        import torch

        from orchestrator.wings.engines import materialise

        whole = materialise.whole
        with mock.patch.object(materialise, "whole", lambda task, *_: whole(task).to(torch.bfloat16)):
            super().__init__(task)


class NoAccumulation(DdpEngine):
    """Updates after every micro-batch."""

    def before_micro_batch(self, *, last: bool) -> None:
        super().before_micro_batch(last=True)
        self._last = last

    def backward(self, loss: Any) -> None:
        super().backward(loss)
        if not self._last:
            self._update.optimizer.step()
            self._update.optimizer.zero_grad(set_to_none=False)


class Undivided(DdpEngine):
    """Micro-batches' gradients are added up and not divided by their number."""

    def backward(self, loss: Any) -> None:
        super().backward(loss * 4)


class DefaultClip(DdpEngine):
    """Clips at 1.0 where nothing is said: DeepSpeed since 0.19.3."""

    def step(self, rates: Any) -> Any:
        import torch

        torch.nn.utils.clip_grad_norm_(self._update.params, 1.0)
        return super().step(rates)


class Mean(DdpEngine):
    """Gradients are averaged over the ranks, where they are to be summed."""

    def __init__(self, task: Any) -> None:
        super().__init__(task)
        self._world = 1


class Skipped(DdpEngine):
    """The third update is not made."""

    _made = 0

    def step(self, rates: Any) -> Any:
        self._made += 1
        with mock.patch.object(self._update.optimizer, "step") if self._made == 3 else _nothing():
            return super().step(rates)


class FrozenTrained(DdpEngine):
    """Trains also what the configuration freezes."""

    def __init__(self, task: Any) -> None:
        task.model.requires_grad_(True)
        super().__init__(task)


class DroppedLast(DdpEngine):
    """The last micro-batch of a step is not trained on."""

    def before_micro_batch(self, *, last: bool) -> None:
        super().before_micro_batch(last=last)
        self._last = last

    def backward(self, loss: Any) -> None:
        super().backward(loss * 0 if self._last else loss)


class Untied(DdpEngine):
    """The head gets weights of its own."""

    def __init__(self, task: Any) -> None:
        import torch

        head = task.model.get_output_embeddings()
        first, name = task.first_value, "model.embed_tokens.weight"
        head.weight = torch.nn.Parameter(torch.empty_like(head.weight))
        embedding = task.model.get_input_embeddings().weight
        super().__init__(replace(
            task, first_value=lambda one, param: first(name, embedding) if param is head.weight else first(one, param)
        ))  # fmt: skip


class Compressed(DdpEngine):
    """Gradients are sent in bf16."""

    def __init__(self, task: Any) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        super().__init__(task)
        self.module.register_comm_hook(None, bf16_compress_hook)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


@contextmanager
def engine(kind: type[DdpEngine]) -> Iterator[None]:
    """Another engine takes the place of DDP."""
    with mock.patch("orchestrator.wings.engines.ddp.build", kind):
        yield


@contextmanager
def seed_by_rank() -> Iterator[None]:
    """Each rank draws the order of its samples from a seed of its own."""
    import torch.distributed as dist

    from orchestrator.workloads import data

    order = data.epoch_order
    with mock.patch.object(data, "epoch_order", lambda count, seed, epoch: order(count, seed + dist.get_rank(), epoch)):
        yield


@contextmanager
def no_sampler() -> Iterator[None]:
    """All ranks read the same samples."""
    with mock.patch("orchestrator.worker.micro_batches.slice_for_rank", lambda size, rank, world: (0, size // world)):
        yield


# What the verdict says first, by fault; its work.
FAULTS: dict[str, tuple[Callable[..., Any], Work, str]] = {
    "bf16 moments": (functools.partial(engine, Bf16States), BASE, "masters in bf16"),
    "no accumulation": (functools.partial(engine, NoAccumulation), BASE, "4 updates, not 1 at step 1"),
    "accumulation without division": (functools.partial(engine, Undivided), BASE, "norm off by 3e+00 at step 1"),
    "clip by default": (functools.partial(engine, DefaultClip), NO_CLIP, "off by"),
    "another seed per rank": (seed_by_rank, BASE, "other tokens at step 1"),
    "no sampler": (no_sampler, BASE, "other tokens at step 1"),
    "mean for sum": (functools.partial(engine, Mean), BASE, "norm off by 5e-1 at step 1"),
    "a skipped update": (functools.partial(engine, Skipped), BASE, "update 3 skipped"),
    "frozen part trained": (functools.partial(engine, FrozenTrained), LORA, "trains"),
    "dropped last batch": (functools.partial(engine, DroppedLast), BASE, "norm off by"),
    "tied weights untied": (functools.partial(engine, Untied), TIED, "other first weights"),
    "gradient in 16 bits": (functools.partial(engine, Compressed), BASE, "gradients sent in bf16"),
}


def _with_faults(precision: str, steps: int) -> list[Run]:
    works = {work._replace(precision=precision) for _, work, _ in FAULTS.values()}
    runs = [reference_of(work, steps) for work in sorted(works, key=str)]
    runs += [Run(f"ddp {work.name}", config_of(work, "ddp", steps=steps)) for work in sorted(works, key=str)]
    for name, (fault, work, _) in FAULTS.items():
        runs.append(Run(name, config_of(work._replace(precision=precision), "ddp", steps=steps), fault))
    return runs


def _check(precision: str, steps: int, folder: Path) -> None:
    found = entries_of(folder, _with_faults(precision, steps))
    judged = verdicts(list(found.values()))
    print(*(f"{label}: {verdict.differences}" for label, verdict in judged.items()), sep="\n")
    texts = {name: judged[name].differences for name in FAULTS}
    missed = {name: texts[name] for name, (_, _, text) in FAULTS.items() if text not in "; ".join(texts[name])}
    assert missed == {}
    assert {label: one for label, one in judged.items() if label not in FAULTS and not one.is_equal} == {}


def test_every_fault_is_refused_in_fp32(tmp_path: Path) -> None:
    _check("fp32", SHORT_STEPS, tmp_path)


@pytest.mark.full
def test_every_fault_is_refused_in_bf16(tmp_path: Path) -> None:
    _check("bf16", STEPS, tmp_path)


WORKS = [
    Work(),
    Work(accumulation=4, model="neox"),
    Work(accumulation=2, model="lora"),
    Work(accumulation=4, clip_norm=None),
    Work(accumulation=2, model="tied"),
    Work("bf16", accumulation=2),
    Work("bf16", accumulation=4, model="tied"),
    Work("bf16", model="lora"),
    Work("fp16"),
]
ENGINES = {"zero": (0, 1, 2, 3), "ddp": (0,), "fsdp2": (1, 2, 3), "deepspeed": (0, 1, 2, 3)}


def _problems(run: Run) -> list[str]:
    """Why the engine cannot train the row here."""
    kind = run.config.engine.kind
    return (
        []
        if run.config.engine.is_own
        else [str(one) for one in wings.load(wings.ENGINES[kind]).problems_of(run.config)]
    )


@pytest.mark.full
def test_no_row_of_equal_work_is_refused(tmp_path: Path) -> None:
    """Forty rows and more: of each engine that is installed at all its stages, in works that differ in precision,
    accumulation, clipping and model."""
    engines = dict(ENGINES)
    if importlib.util.find_spec("deepspeed") is None:
        print("left out: DeepSpeed's rows, as deepspeed is not installed (pip install zero-lab[deepspeed])")
        del engines["deepspeed"]
    every = list(rows(WORKS, engines))
    cannot = {run.label: problems for run in every if (problems := _problems(run))}
    print(*(f"left out: {label}, as {one}" for label, problems in cannot.items() for one in problems), sep="\n")
    assert all(label.startswith("deepspeed") and "fp16" in label for label in cannot), cannot  # on a CPU
    found = entries_of(tmp_path, [run for run in every if run.label not in cannot], timeout_s=3000)
    judged = verdicts(list(found.values()))
    assert len(judged) >= 40
    assert {label: one for label, one in judged.items() if not one.is_equal} == {}
