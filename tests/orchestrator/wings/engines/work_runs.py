"""Trains tiny points of engines on ranks that live through all of them, and with a fault in the engine or the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from harness.patience import HANG_S
from harness.ranks import run_ranks

from orchestrator.config.engine import EngineChoice, EngineKind
from orchestrator.config.optimizer import Optimizer
from orchestrator.config.schema import (
    Adapter,
    AdapterKind,
    Data,
    DataKind,
    Device,
    Measure,
    Model,
    ResolvedBatch,
    ResolvedResources,
    RunConfig,
    to_dict,
)
from orchestrator.config.state_groups import Precision, Zero
from orchestrator.records.record_file import read_json, write_json_atomic
from orchestrator.records.run_record import AttemptPaths
from orchestrator.records.turns import open_turns
from orchestrator.report.entry import Entry
from zero_runtime.precision import MixedPrecision

RANKS, GLOBAL_SIZE, STEPS = 2, 16, 20
LLAMA = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}  # fmt: skip
NEOX = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "max_position_embeddings": 64, "hidden_dropout": 0.0, "attention_dropout": 0.0}  # fmt: skip
MODELS = {
    "llama": Model("tiny", "llama", {**LLAMA, "tie_word_embeddings": False}),
    "tied": Model("tied", "llama", {**LLAMA, "tie_word_embeddings": True}),
    "lora": Model("lora", "llama", {**LLAMA, "tie_word_embeddings": False}),
    "neox": Model("neox", "gpt_neox", NEOX),
}
Fault = Callable[[], AbstractContextManager[None]]


class Run(NamedTuple):
    """A point to train; `fault`: a context in which each rank trains it."""

    label: str
    config: RunConfig
    fault: Fault = nullcontext


class Work(NamedTuple):
    """What rows must agree in."""

    precision: str = "fp32"
    accumulation: int = 1
    model: str = "llama"
    clip_norm: float | None = 1.0

    @property
    def name(self) -> str:
        return f"{self.precision}-{self.accumulation}-{self.model}-{self.clip_norm}"


def config_of(work: Work, kind: str, stage: int = 0, *, ranks: int = RANKS, steps: int = STEPS) -> RunConfig:
    """A point of an engine. A plain one has one rank, and the micro-batches of the others."""
    micro = GLOBAL_SIZE // work.accumulation // RANKS
    dtypes = MixedPrecision() if work.precision == "fp32" else MixedPrecision(work.precision)  # type: ignore[arg-type]
    return RunConfig(
        engine=EngineChoice(kind=EngineKind(kind), counted=True),
        model=MODELS[work.model],
        adapter=Adapter(AdapterKind.lora, rank=4) if work.model == "lora" else Adapter(),
        data=Data(DataKind.synthetic),
        zero=Zero(stage=stage),
        precision=Precision(dtypes, compute=work.precision),  # type: ignore[arg-type]
        batch=ResolvedBatch(micro=micro, accumulation=GLOBAL_SIZE // micro // ranks, global_size=GLOBAL_SIZE, seq=16),
        resources=ResolvedResources(Device.cpu, ranks=ranks, threads=1),
        measure=Measure(warmup_steps=3, steps=steps - 3, validation_batches=0),
        optimizer=Optimizer(lr=3e-3, clip_norm=work.clip_norm),
    )


def reference_of(work: Work, steps: int = STEPS) -> Run:
    return Run(f"plain {work.name}", config_of(work, "plain", ranks=1, steps=steps))


def entries_of(
    folder: Path, runs: list[Run], timeout_s: float = HANG_S, comm: str | None = None, *, short: bool = False
) -> dict[str, Entry]:
    """Trains the runs and gives their rows by label. Those of as many ranks share processes.

    short: each is one round of its point.
    comm: over what the ranks talk, see zero_runtime.world; None: as harness.ranks has it.
    """
    found: dict[str, Entry] = {}
    together: dict[tuple[int, str], list[Run]] = {}
    for run in runs:  # DeepSpeed replaces parts of torch for its process
        own = run.label if run.config.engine.kind is EngineKind.deepspeed else ""
        together.setdefault((run.config.ranks, own), []).append(run)
    for (ranks, _), chosen in together.items():
        for run in chosen:
            _attempt(folder, run).root.mkdir(parents=True)
            write_json_atomic(_attempt(folder, run).state, {"contents": {}})
            if short:
                open_turns(_attempt(folder, run), "session", number=1, short=True)
        (reason, *_) = run_ranks(_train, ranks, folder, chosen, comm, timeout_s=timeout_s)
        if reason:
            pytest.skip(f"comm=shm is not possible here: {reason}")
        for run in chosen:
            result = read_json(_attempt(folder, run).result)
            found[run.label] = Entry(run.label, "ok", result, config=to_dict(run.config))
    return found


def _attempt(folder: Path, run: Run) -> AttemptPaths:
    return AttemptPaths(folder / run.label.replace(" ", "_") / "attempts" / "01")


def _join_over(comm: str, place: Path) -> str:
    """Replace the default group by one that talks over `comm`. Returns why it does not."""
    import torch.distributed as dist

    from zero_runtime.wings import SHM_REASON, load
    from zero_runtime.world import SHM, cpu_backend

    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group(
        cpu_backend(comm, world), store=dist.FileStore(str(place), world), rank=rank, world_size=world
    )
    return str(load(SHM_REASON)()) if comm == SHM else ""


def _train(folder: Path, runs: list[Run], comm: str | None) -> str:
    """On each rank: trains them one after the other. Returns why the ranks cannot talk over `comm`, or nothing."""
    import torch.distributed as dist

    from orchestrator.launch.rank import RankInfo
    from orchestrator.worker.setup import build_engine, prepare_process
    from orchestrator.worker.train import run_of, train_and_record

    if comm is not None and (reason := _join_over(comm, folder / f"{runs[0].label} over {comm}")):
        return reason
    rank = RankInfo(dist.get_rank(), dist.get_world_size(), dist.get_rank(), folder / "rendezvous")
    for run in runs:
        with run.fault():
            device = prepare_process(run.config, rank.local_rank)
            built = build_engine(run.config, device, None)  # type: ignore[arg-type]  # no watch over these ranks
            train_and_record(run_of(_attempt(folder, run), run.config, rank, built))
            built.runtime.close()
    return ""


def rows(works: list[Work], engines: Mapping[str, tuple[int, ...]]) -> Iterator[Run]:
    """A run of each engine at each of its stages, for each work, and the plain run of the work."""
    for work in works:
        yield reference_of(work)
        for kind, stages in engines.items():
            for stage in stages:
                yield Run(f"{kind}{stage} {work.name}", config_of(work, kind, stage))


def with_engine(config: RunConfig, kind: str) -> RunConfig:
    return replace(config, engine=replace(config.engine, kind=EngineKind(kind)))
