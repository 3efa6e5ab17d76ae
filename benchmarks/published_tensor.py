"""Compares predicted peaks and borders of tensor-parallel runs with the published ones.

The bytes are the rules of published_peers.py for the slices of a rank, and the activations of the divided model.
Needs no GPU.

[Note: gathered logits]
Aleph Alpha's library gathers the logits of a tensor-parallel group: its head is a ColumnParallelLinear without
`parallel_output`, and the loss is torch's cross entropy of all logits in fp32 (Aleph-Alpha/scaling,
transformer/model/layers/lm_head.py, losses/cross_entropy.py). The 16-bit logits stay in the pipeline's buffers until
the next micro-batch's take their place (core/nn/parallel_module/parallel_module.py, `_execute_loss_fn`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.published_borders import CAPACITY_GIB
from benchmarks.published_cases import GIB, summary, table
from benchmarks.published_peers import kept_inputs, nanotron
from benchmarks.published_speed import Row, TracedRun, traced
from orchestrator.config.schema import RunConfig
from orchestrator.wings.predict import memory_cache, peer_fit
from orchestrator.wings.predict.step import with_micro
from zero_runtime.predict.memory.device_overhead import DeviceOverhead
from zero_runtime.predict.memory.peers import HALF, SINGLE, PeerMemory, PeerTerm

GATHERS_LOGITS = ("aleph_alpha",)  # see [Note: gathered logits]
TWICE, HALVED = " (twice the micro-batch)", " (half the micro-batch)"


@dataclass(frozen=True)
class TensorRun:
    """A labelled run. peak: predicted bytes that torch allocates at most; again: if inputs were gathered again in
    backward. fits, within_step: as of `Border`."""

    row: Row
    peak: int
    again: int
    fits: bool
    within_step: bool

    @property
    def right(self) -> bool:
        return self.fits == (self.row["outcome"] == "fits")

    @property
    def error(self) -> float | None:
        """Relative to the published peak; None if there is none."""
        return self._error(self.peak)

    @property
    def error_again(self) -> float | None:
        """The error if inputs were gathered again."""
        return self._error(self.again)

    def _error(self, nbytes: int) -> float | None:
        return nbytes / GIB / float(self.row["memory_gib"]) - 1 if self.row["memory_gib"] else None


def tensor_runs() -> list[TensorRun]:
    """Every labelled row of the table that is not left out."""
    rows = [row for row in table("tensor_parallel.csv") if row["outcome"] and not row["left_out"]]
    near = [_near(row, 2 * int(row["micro"]), TWICE) for row in rows]
    near += [_near(row, int(row["micro"]) // 2, HALVED) for row in rows if int(row["micro"]) > 1]
    runs = traced([*rows, *near], GATHERS_LOGITS)
    return [_run(row, runs) for row in rows]


def _near(row: Row, micro: int, name: str) -> Row:
    return {**row, "micro": str(micro), "case": row["case"] + name}


def _run(row: Row, runs: dict[str, TracedRun]) -> TensorRun:
    peak = _peak(row, runs[row["case"]])
    fits = peak + _overhead(row) <= CAPACITY_GIB[row["device"]] * GIB
    near = runs.get(row["case"] + (TWICE if fits else HALVED))
    other = fits if near is None else _peak(row, near) + _overhead(row) <= CAPACITY_GIB[row["device"]] * GIB
    return TensorRun(
        row, peak, _peak(row, runs[row["case"]], keeps=False), fits, fits == (row["outcome"] == "fits") or other != fits
    )


def _overhead(row: Row) -> int:
    found = DeviceOverhead.on_cuda(int(row["world"]), int(row["world"]))
    return (found.least + found.most) // 2


def _peak(row: Row, run: TracedRun, *, keeps: bool = True) -> int:
    memory = run.memory
    assert memory is not None, run.memories.unknown(run.config)
    found = peer_fit.peak_of(_rules(row, run), memory, run.config.batch.micro)
    assert found is not None, run.memories.unknown(run.config)
    held = _logits(run.config) if row["table"] in GATHERS_LOGITS else 0
    return found.total + held + (kept_inputs(run.config) if keeps and row["tokens"] == "gathered" else 0)


def _logits(config: RunConfig) -> int:
    """Bytes of the 16-bit logits of a micro-batch."""
    return config.batch.micro * config.batch.seq * int(config.model.config["vocab_size"]) * HALF


def _rules(row: Row, run: TracedRun) -> PeerMemory:
    one = with_micro(run.config, 1)
    shapes = memory_cache.answers([one], [])[memory_cache.units_key(one)]
    model, ranks = peer_fit.peer_model(shapes, run.config.optimizer.rule), run.config.data_ranks
    if row["table"] == "playbook":
        return nanotron(model, run.config.zero.plan, ranks)
    states = PeerTerm("states, 12P/N", 3 * SINGLE * -(-model.numel // ranks))
    weights = PeerTerm("parameters and gradients, 4P", 2 * HALF * model.numel)
    return PeerMemory("the paper's closed form", (weights, states))


def report() -> Iterator[str]:
    """The lines of a section."""
    found = tensor_runs()
    yield from ("", "## Tensor parallelism", "")
    yield "The rules of nanotron for the Playbook, and 4P + 12P/N for Aleph Alpha, on the slices of a rank."
    yield "Aleph Alpha's runs divide the tokens between layers where the name says so, and gather all logits, which"
    yield "stay until those of the next micro-batch take their place. The Playbook's are predicted"
    yield "with the gathered inputs of column layers kept for backward; the last column is the median error if they are"
    yield "gathered again, as nanotron's default and this project do."
    columns = "labels | right | within a step | peaks | median error | bias | worst | within 10 % | gathered again"
    yield from ("", f"| source | tp | {columns} |", "|---" * 11 + "|")
    for source in ("playbook", "aleph_alpha"):
        of_source = [run for run in found if run.row["table"] == source]
        for degree in sorted({int(run.row["tensor_parallel"]) for run in of_source}):
            mine = [run for run in of_source if int(run.row["tensor_parallel"]) == degree]
            yield f"| {source} | {degree} | {_scores(mine)} |"
        yield f"| {source} | all | {_scores(of_source)} |"
    clear = [run for run in found if run.row["outcome"] != "none"]
    yield f"| without cells that may be crashes | | {_scores(clear)} |"
    yield from ("", "Peaks (GiB):", "", "| case | predicted | published | error |", "|---|---|---|---|")
    for run in found:
        if run.error is not None:
            peaks = f"{run.peak / GIB:.1f} | {float(run.row['memory_gib']):.1f} | {run.error:+.1%}"
            yield f"| {run.row['case']} | {peaks} |"
    yield from ("", "Labels not in agreement (GiB):", "", "| case | label | predicted | within a step |")
    yield "|---|---|---|---|"
    for run in found:
        if not run.right:
            label = "empty" if run.row["outcome"] == "none" else run.row["outcome"]
            yield f"| {run.row['case']} | {label} | {run.peak / GIB:.1f} | {'yes' if run.within_step else 'no'} |"


def _scores(runs: Sequence[TensorRun]) -> str:
    right, within = sum(run.right for run in runs), sum(run.within_step for run in runs)
    labels = f"{len(runs)} | {right} ({right / len(runs):.0%}) | {within} ({within / len(runs):.0%})"
    errors = [run.error for run in runs if run.error is not None]
    if not errors:
        return f"{labels} | 0 | | | | |"
    middle, worst = summary(errors).removeprefix("median ").split(", worst ")
    near = sum(abs(error) <= 0.1 for error in errors)
    again = median(abs(run.error_again) for run in runs if run.error_again is not None)
    return f"{labels} | {len(errors)} | {middle} | {median(errors):+.1%} | {worst} | {near} | {again:.1%}"
