"""Predicts every usable case of the tables in `published/` and prints the error of each source.

`python benchmarks/published.py [--write]`. Closed forms, and peaks: the byte rules of other engines, and activations
counted on fake tensors. Nothing is fitted. `--write` writes results/published_DATE.md. Needs no GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from benchmarks import published_closed_forms as closed_forms  # noqa: E402
from benchmarks import published_tensor  # noqa: E402
from benchmarks.published_borders import PEAK_NOTES, Border, borders  # noqa: E402
from benchmarks.published_cases import GIB, Comparison, LeftOut, summary  # noqa: E402
from benchmarks.published_stages import StagePair, comparisons, stage_pair, terms  # noqa: E402
from benchmarks.published_tutorials import qwen_lines, t0_lines  # noqa: E402
from zero_runtime.predict.memory.peers import Moment  # noqa: E402

CLOSED_FORMS = {
    "ZeRO paper, table 1 and figure 1 (GB)": closed_forms.zero_states,
    "ZeRO paper, table 2 (1e9 parameters)": closed_forms.zero_largest,
    "ZeRO-Infinity, figure 2a": closed_forms.zero_infinity,
    "DeepSpeed's estimators (GiB)": closed_forms.deepspeed_estimates,
    "Megatron's golden resting bytes": closed_forms.megatron_resting,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write results/published_DATE.md")
    started = time.monotonic()
    write = parser.parse_args().write
    lines = list(report())
    print("\n".join(lines))
    print(f"({time.monotonic() - started:.0f} s)", file=sys.stderr)
    if write:
        target = Path(__file__).with_name("results") / f"published_{date.today()}.md"
        target.write_text("\n".join(lines) + "\n", encoding="utf-8")


def report() -> Iterator[str]:
    """The lines of the report."""
    yield "# Predictions against published numbers"
    yield ""
    yield "`python benchmarks/published.py --write` writes this file. What each set's number is (unit, allocated or"
    yield "reserved, resting or peak) is in [published/README.md](../published/README.md). Nothing is fitted to a case."
    forms = {name: list(read()) for name, read in CLOSED_FORMS.items()}
    pair = stage_pair()
    labelled = list(borders())
    yield from _closed_form_lines(forms)
    yield from _stage_lines(pair)
    yield from _border_lines(labelled)
    yield from published_tensor.report()
    yield from ("", "## Two tutorials", "", "### Qwen2.5-0.5B on four GPUs", "", *qwen_lines())
    yield from ("", "### T0_3B and DeepSpeed's estimator", "", *t0_lines())


def _closed_form_lines(forms: dict[str, list[Comparison | LeftOut]]) -> Iterator[str]:
    yield from ("", "## Closed forms", "", "| source | compared | agree | error | left out |", "|---|---|---|---|---|")
    disagreeing: list[tuple[str, Comparison]] = []
    reasons: list[str] = []
    for name, rows in forms.items():
        compared = [row for row in rows if isinstance(row, Comparison)]
        agree = [row for row in compared if row.agrees]
        left = Counter(row.reason for row in rows if isinstance(row, LeftOut))
        errors = summary([row.error for row in agree])
        yield f"| {name} | {len(compared)} | {len(agree)} | {errors} | {sum(left.values())} |"
        disagreeing += [(name, row) for row in compared if not row.agrees]
        reasons += [f"- {name}: {count} rows left out. {reason}." for reason, count in left.items()]
    yield from (
        "",
        "A printed number agrees if it is the exact one, rounded or truncated to the printed digits; a golden value,",
        "if it is within 1 %. ZeRO's table 2 is rounded before it is multiplied: 1 %, and 3 % from 0.5T on. Errors",
        "are of the rows that agree.",
        "",
        *reasons,
        "",
        "Not in agreement:",
        "",
        "| source | case | predicted | published | reason |",
        "|---|---|---|---|---|",
    )
    for name, row in disagreeing:
        yield f"| {name} | {row.case} | {row.predicted:.2f} | {row.published:g} | {row.reason or 'unknown'} |"


def _stage_lines(pair: StagePair) -> Iterator[str]:
    yield from ("", "## ZeRO-3 above ZeRO-2 (DeepSpeed issue 3734)", "")
    yield "13B parameters on 8 A100 80 GB; GiB per GPU. With ZeRO-3 less is allocated at rest and more at the peak."
    yield from ("", "| term in forward and backward | ZeRO-2 | ZeRO-3 |", "|---|---|---|")
    for memory, column in ((pair.two, 0), (pair.three, 1)):
        for term in terms(memory):
            cells = ["", ""]
            cells[column] = f"{term.nbytes / GIB:.2f}"
            yield f"| {term.what} | {cells[0]} | {cells[1]} |"
    least, most = pair.activations
    peaks = [pair.three_peak(one, built_sharded=False) for one in pair.activations]
    sharded = [pair.three_peak(one, built_sharded=True) for one in pair.activations]
    yield f"| activations that ZeRO-2's peak leaves | {least:.2f} to {most:.2f} | the same |"
    yield f"| predicted peak | (given) | {peaks[0]:.2f} to {peaks[1]:.2f} |"
    published = [pair.published[zero]["peak_gib"] for zero in ("2", "3")]
    step = pair.two.at(Moment.ALWAYS, Moment.GRADIENTS, Moment.STEP) / GIB
    yield f"| published peak | {published[0]:.2f} | {published[1]:.2f} |"
    yield ""
    for row in comparisons(pair):
        verdict = "agrees" if row.agrees else "does not agree"
        yield f"- {row.case}: {row.predicted:.2f}, published {row.published:.2f} ({row.error:+.1%}), {verdict}."
    yield from (
        "- The higher peak comes from the gathered weights: `torch.nn.functional.linear` saves a view of each one for",
        "  backward, so that releasing the parameter does not free it, and at the end of forward every GPU holds the",
        "  complete model. `zero.Init` replaces that function with one that saves no view; then the peak would be",
        f"  {sharded[0]:.2f} to {sharded[1]:.2f} GiB. That the model was built without `zero.Init` is inferred from",
        "  the bytes; the part of the issue that was read does not say it.",
        f"- The optimizer's step is left out. With it ZeRO-2's peak would be {step:.2f} GiB, above the published one.",
        "  The resting bytes contain gradients, which a step frees: they may be those between micro-batches. Unknown.",
    )


def _border_lines(rows: Sequence[Border | LeftOut]) -> Iterator[str]:
    yield from ("", "## Peaks and out-of-memory borders", "")
    yield "A row is right if the predicted use (allocated, and the allowance for CUDA and NCCL) is on the label's side"
    yield "of the device's capacity. It is right within a step if half or twice the micro-batch is on that side."
    yield from (
        "",
        "| source | labels | right | within a step | left out | error of peaks |",
        "|---|---|---|---|---|---|",
    )
    compared = [row for row in rows if isinstance(row, Border)]
    left = [row for row in rows if isinstance(row, LeftOut)]
    for name in dict.fromkeys(row.table for row in compared):
        here = [row for row in compared if row.table == name]
        skipped = sum(row.case.startswith(f"{name}:") for row in left)
        yield f"| {name} | {_score(here)} | {skipped} | {summary(_errors(here))} |"
    yield f"| all | {_score(compared)} | {len(left)} | {summary(_errors(compared))} |"
    clear = [row for row in compared if row.outcome != "none"]
    yield f"| without cells that may be crashes | {_score(clear)} | | |"
    decided = [row for row in clear if row.peak and row.published_gib is None]
    yield f"| of these, decided by activations, without a published peak | {_score(decided)} | | |"
    yield from ("", "Not in agreement (GiB):", "")
    yield "| source | case | label | activations | predicted use | capacity side | within a step | reason |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in compared:
        if not row.right:
            yield _border_row(row)
    yield from ("", "Peaks (GiB):", "", "| source | case | predicted | published | error |", "|---|---|---|---|---|")
    for row in compared:
        if row.peak and row.published_gib:
            predicted = row.peak.allocated / GIB
            error = predicted / row.published_gib - 1
            yield f"| {row.table} | {row.case.case} | {predicted:.1f} | {row.published_gib:.1f} | {error:+.1%} |"
    yield from ("", *(f"- {name}: {note}." for name, note in PEAK_NOTES.items()))
    yield from ("", "Left out:", "", *(f"- {row.case}: {row.reason}." for row in left))


def _score(rows: Sequence[Border]) -> str:
    right, within = sum(row.right for row in rows), sum(row.within_step for row in rows)
    return f"{len(rows)} | {right} ({right / len(rows):.0%}) | {within} ({within / len(rows):.0%})"


def _errors(rows: Iterable[Border]) -> list[float]:
    return [row.peak.allocated / GIB / row.published_gib - 1 for row in rows if row.peak and row.published_gib]


def _border_row(row: Border) -> str:
    activations = f"{row.peak.activations / GIB:.1f}" if row.peak else "-"
    used = f"{row.peak.used / GIB:.1f}" if row.peak else "states alone exceed it"
    side = "fits" if row.fits else "exceeds"
    label = "empty" if row.outcome == "none" else row.outcome
    step = "yes" if row.within_step else "no"
    return f"| {row.table} | {row.case.case} | {label} | {activations} | {used} | {side} | {step} | {row.reason} |"


if __name__ == "__main__":
    main()
