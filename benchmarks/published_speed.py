"""Predicts the step times of published runs from data sheets, and prints the error of each source.

`python benchmarks/published_speed.py [--write]`. The runs are those of `published/speeds.csv`: data parallel, ZeRO or
FSDP, and those of `published/tensor_parallel.csv`. Each is predicted as a step of this runtime with that stage, model
and batch, and with the norms and the attention kernels that the run had. The shares of the data sheets were fitted to
these runs (published_shares.py, which also predicts sources that are left out). `--write` writes
results/published_speed_DATE.md. Needs no GPU; traces of models are kept in the user's cache.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from benchmarks import published_kernels  # noqa: E402
from benchmarks.published_cases import LeftOut, summary, table  # noqa: E402
from benchmarks.published_kernels import Kernels  # noqa: E402
from benchmarks.published_peak import config_of  # noqa: E402
from orchestrator.compose import arguments, compose  # noqa: E402
from orchestrator.config.schema import Model, RunConfig  # noqa: E402
from orchestrator.machine.hardware import Hardware  # noqa: E402
from orchestrator.planning.points import checked_points  # noqa: E402
from orchestrator.planning.rules.scene import Scene  # noqa: E402
from orchestrator.wings.predict import memory_cache, rough_time, step  # noqa: E402
from orchestrator.wings.predict.speed import Speed, speed_of  # noqa: E402
from zero_runtime.activations.rule import RecomputeRule  # noqa: E402
from zero_runtime.predict.timing.data_sheet import PUBLISHED  # noqa: E402

GPUS_PER_NODE = 8
# The kernels of runs with the first FlashAttention, and what these reach, as a share of that of the second: by the fit
# (published_shares.py). No step of this runtime has them.
FIRST, FIRST_ATTENTION = "flash_1", 0.561
FAR = 0.5  # an error above this is listed as not in agreement
LONG_SEQ = 32768  # from here on attention is most of the work of the models that are compared
# As the model's structure says too. With a pattern every rank of a tensor-parallel group has all tokens between layers.
WHOLE_TOKENS = "model.layers.*.mlp.down_proj=row"
Row = dict[str, str]


@dataclass(frozen=True)
class Predicted:
    """A published step time in seconds, and the predicted one."""

    row: Row
    config: RunConfig
    speed: Speed
    published_s: float

    @property
    def error(self) -> float:
        return self.speed.time.total_s / self.published_s - 1

    @property
    def group(self) -> tuple[str, str, str]:
        """Runs that are ranked with each other: of one source, model and GPU."""
        return self.row["table"], self.row["model"], self.row["device"]

    @property
    def tokens_per_gpu(self) -> int:
        """Tokens of a step of each GPU."""
        batch = self.config.batch
        return batch.micro * (batch.accumulation or 1) * batch.seq


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write results/published_speed_DATE.md")
    started = time.monotonic()
    write = parser.parse_args().write
    lines = list(report(predictions(runs())))
    print("\n".join(lines))
    print(f"({time.monotonic() - started:.0f} s)", file=sys.stderr)
    if write:
        target = Path(__file__).with_name("results") / f"published_speed_{date.today()}.md"
        target.write_text("\n".join(lines) + "\n", encoding="utf-8")


def predictions(rows: Sequence[Row]) -> list[Predicted | LeftOut]:
    """In the order of the rows."""
    found = traced(rows)
    return [_predicted(row, found.get(row["case"])) for row in rows]


def runs() -> list[Row]:
    """The published step times, without and with tensor parallelism."""
    return [*table("speeds.csv"), *(row for row in table("tensor_parallel.csv") if row["step_s"])]


class TracedRun(NamedTuple):
    """The configuration with which this runtime would repeat a published run, and the traces to predict it from."""

    config: RunConfig
    memories: step.Memories

    @property
    def memory(self) -> step.ConfigMemory | None:
        return self.memories.of(self.config)


def traced(rows: Sequence[Row], gathers_logits: Collection[str] = ()) -> dict[str, TracedRun]:
    """The rows that are not left out, by case. Norms are one kernel where the published run had one, and heads gather
    in the tables `gathers_logits`."""
    configs = {row["case"]: config_of_row(row) for row in rows if not row["left_out"]}
    kernels = {row["case"]: Kernels(row["kernels"] == "flash_norm", row["table"] in gathers_logits) for row in rows}
    answers: dict[Kernels, dict[str, Any]] = {one: {} for one in kernels.values()}
    families: dict[tuple[Kernels, str], list[RunConfig]] = {}
    for case, config in configs.items():
        key = memory_cache.activations_key(config, any_micro=True)
        families.setdefault((kernels[case], key), []).append(config)
    for done, ((used, _), family) in enumerate(families.items()):
        print(f"traced {done} of {len(families)} models, lengths and recomputations", end="\r", file=sys.stderr)
        if any(used):
            for one in {memory_cache.units_key(config): config for config in family}.values():
                answers[used] |= published_kernels.answers(one, used)
        else:
            answers[used] |= memory_cache.answers(family, family, together=True)
    print(file=sys.stderr)
    memories = {used: step.Memories(known) for used, known in answers.items()}
    return {case: TracedRun(config, memories[kernels[case]]) for case, config in configs.items()}


def _predicted(row: Row, run: TracedRun | None) -> Predicted | LeftOut:
    name = f"{row['table']}: {row['case']}"
    if run is None:
        return LeftOut(name, row["left_out"])
    memory = run.memory
    speed = None if memory is None else speed_of(memory, "")
    if memory is None or speed is None:
        return LeftOut(name, run.memories.unknown(run.config) or "the step could not be traced")
    if speed.outside:
        return LeftOut(name, f"no number is shown for {speed.outside}")
    if row["kernels"] == FIRST:
        shares = rough_time.shares_of(memory.config)
        older = rough_time.estimate(memory, replace(shares, attention=shares.attention * FIRST_ATTENTION))
        assert older is not None, "it is the same step with other shares"
        assert speed.mfu is not None, "a described GPU has a peak"
        speed = replace(speed, time=older.step, mfu=speed.mfu * speed.time.total_s / older.step.total_s)
    return Predicted(row, run.config, speed, float(row["step_s"]))


@functools.cache
def _base(device: str) -> RunConfig:
    words = f"--plan hardware={device} resources.device=cuda precision=bf16".split()
    scene = Scene(Hardware(1, "cpu"), plan_only=True, needs_weights=False)
    found, problems = checked_points(compose.compose(arguments.split(words)), scene)
    assert not problems, problems
    return found[0].config


def config_of_row(row: Row) -> RunConfig:
    """The configuration with which this runtime would repeat a published run."""
    base, ranks, micro = _base(row["device"]), int(row["world"]), int(row["micro"])
    accumulation, slices = int(row["accumulation"]), int(row.get("tensor_parallel", "1"))
    patterns = [WHOLE_TOKENS] if row.get("tokens") == "whole" else []
    model_type, arguments_of_model = config_of(row["model"])
    dtypes = base.precision.dtypes
    if row["precision"] == "bf16_reduced_in_bf16":
        dtypes = replace(dtypes, reduce="bf16")
    return replace(
        base,
        model=Model(row["model"], model_type, arguments_of_model),
        parallel=replace(base.parallel, tp=slices, patterns=patterns),
        zero=replace(base.zero, stage=int(row["zero"])),
        precision=replace(base.precision, dtypes=dtypes),
        recompute=RecomputeRule(row["recompute"]),  # type: ignore[arg-type]  # a word
        resources=replace(base.resources, ranks=ranks, nodes=-(-ranks // GPUS_PER_NODE)),
        batch=replace(
            base.batch,
            micro=micro,
            accumulation=accumulation,
            global_size=micro * accumulation * ranks // slices,
            seq=int(row["seq"]),
        ),
    )


def kendall_tau(rows: Sequence[Predicted]) -> tuple[float, int]:
    """Of the throughput of one GPU, over the pairs within groups; and the number of pairs."""
    return kendall_of(
        [(row.group, row.tokens_per_gpu / row.published_s, row.tokens_per_gpu / row.speed.time.total_s) for row in rows]
    )


def kendall_of(speeds: Sequence[tuple[object, float, float]]) -> tuple[float, int]:
    """Kendall's tau of (group, published, predicted) over the pairs of a group; and the number of pairs."""
    score = pairs = 0
    for one, other in itertools.combinations(speeds, 2):
        published, predicted = one[1] - other[1], one[2] - other[2]
        if one[0] == other[0] and published != 0:
            pairs += 1
            score += 1 if published * predicted > 0 else -1
    return (score / pairs if pairs else float("nan")), pairs


def report(found: Iterable[Predicted | LeftOut]) -> Iterator[str]:
    """The lines of the report."""
    found = list(found)
    rows = [one for one in found if isinstance(one, Predicted)]
    yield "# Step times from data sheets against published runs"
    yield ""
    yield "`python benchmarks/published_speed.py --write` writes this file. Each run is predicted as a step of this"
    yield "runtime with the stage, model, batch, norms and attention kernels of the published one, whose engine has"
    yield "another schedule. The error is that of the step's time; the bias is the median of the signed errors."
    yield "Kendall's tau ranks the throughput of a GPU within runs of the same source, model and GPU."
    yield ""
    yield f"Shares of a data sheet, with sources in zero_runtime/predict/timing/data_sheet.py: {_shares()}."
    yield from (
        "",
        "| source | GPU | cases | error of the step | bias | tau | pairs |",
        "|---|---|---|---|---|---|---|",
    )
    for key, members in _by_source(rows).items():
        yield f"| {' | '.join(key)} | {_scores(members)} |"
    yield f"| all | | {_scores(rows)} |"
    far = [row for row in rows if abs(row.error) > FAR]
    yield from ("", f"## Not in agreement: errors above {FAR:.0%}", "")
    yield "| case | GPU | error | probable reason |"
    yield "|---|---|---|---|"
    yield from (f"| {row.row['case']} | {row.row['device']} | {row.error:+.0%} | {_reason(row)} |" for row in far)
    yield from ("", "## All cases", "", *_table(rows))
    yield from ("", "## Left out", "")
    yield from (f"- {one.case}: {one.reason}." for one in found if isinstance(one, LeftOut))


def _shares() -> str:
    return ", ".join(f"{name} {value:g}" for name, value in vars(PUBLISHED).items())


def _by_source(rows: Sequence[Predicted]) -> dict[tuple[str, str], list[Predicted]]:
    found: dict[tuple[str, str], list[Predicted]] = {}
    for row in rows:
        found.setdefault((row.row["table"], row.row["device"]), []).append(row)
    return found


def _scores(rows: Sequence[Predicted]) -> str:
    errors, (tau, pairs) = [row.error for row in rows], kendall_tau(rows)
    return f"{len(rows)} | {summary(errors)} | {median(errors):+.1%} | {f'{tau:.2f}' if pairs else '-'} | {pairs}"


def _reason(row: Predicted) -> str:
    """Not measured: what the case has that the estimate has not, in the direction of its error."""
    if row.error < 0 and row.config.batch.seq >= LONG_SEQ:
        return "attention, most of the work, below its share: its kernel is older than those of other sources"
    if row.error > 0 and row.config.model.model_type != "gpt2":
        return "norms, rotary positions and activations are one kernel each there, and composed of several here"
    return "unknown"


def _table(rows: Sequence[Predicted]) -> Iterator[str]:
    yield "| source | case | GPU | predicted s | published s | error | model | exposed | update | MFU |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        spent, names = row.speed.time, row.row
        parts = (spent.model_s, spent.exposed_s, spent.update_s)
        shares = " | ".join(f"{part / spent.total_s:.0%}" for part in parts)
        times = f"{spent.total_s:.3g} | {row.published_s:.3g} | {row.error:+.0%} | {shares} | {row.speed.mfu:.0%}"
        yield f"| {names['table']} | {names['case']} | {names['device']} | {times} |"


if __name__ == "__main__":
    main()
