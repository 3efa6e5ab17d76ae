"""Compares predicted peaks with published ones, and "fits" with the published borders of out-of-memory errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from benchmarks.published_cases import GIB, LeftOut, table
from benchmarks.published_peak import Case, CasePeak, case_peak, engine_memory, overhead_bytes

TABLES = (
    "playbook.csv",
    "aleph_alpha.csv",
    "deepspeed_autotuning.csv",
    "hugging_face_posts.csv",
    "litgpt.csv",
    "long_sequences.csv",
    "prime_rl.csv",
)
# GiB that torch reports as a GPU's capacity, as in its out-of-memory messages ("79.15 GiB total capacity").
CAPACITY_GIB = {
    "a100_40gb": 39.59,
    "a100_80gb": 79.15,
    "h100_80gb": 79.1,
    "v100_32gb": 31.75,
    "titan_rtx": 23.65,
    "a6000": 47.54,
    "h200": 139.8,
    "b200": 178.35,
}
# What explains the error of a table's peaks, as far as it is known.
PEAK_NOTES = {
    "playbook.csv": "nanotron's own model code is traced as transformers' Llama with a fused norm",
    "litgpt.csv": "LitGPT's own model code is traced as transformers' Llama; what it keeps in addition is unknown",
    "long_sequences.csv": "the published bytes are reserved, not allocated",
    "prime_rl.csv": "the published bytes are reserved, not allocated, and its own loss is not traced",
}
Outcome = Literal["fits", "oom", "none"]


@dataclass(frozen=True)
class Border:
    """One labelled row. `outcome` none: the source shows an empty cell, which is a crash or out of memory. `peak` is
    None where the model states alone exceed the device."""

    table: str
    case: Case
    device: str
    outcome: Outcome
    published_gib: float | None
    peak: CasePeak | None
    fits: bool
    within_step: bool

    @property
    def right(self) -> bool:
        return self.fits == (self.outcome == "fits")

    @property
    def reason(self) -> str:
        """Why the prediction is not that of the source."""
        if self.right:
            return ""
        if self.outcome == "none":
            return "the source does not tell a crash from out of memory"
        return "unknown"


def borders(tables: Iterable[str] = TABLES) -> Iterator[Border | LeftOut]:
    """Every row of the tables, predicted or left out with the reason."""
    for name in tables:
        for row in table(name):
            yield predicted(name, row)


def predicted(name: str, row: dict[str, str]) -> Border | LeftOut:
    """The prediction of one row, or why it cannot be modelled."""
    try:
        return _border(name, row, case_of(row))
    except ValueError as error:
        return LeftOut(f"{name}: {row['case']}", str(error))


def _border(name: str, row: dict[str, str], case: Case) -> Border:
    outcome: Outcome = row["outcome"]  # type: ignore[assignment]  # a word of the table
    capacity = CAPACITY_GIB[row["device"]] * GIB
    fits, peak = fits_in(case, capacity)
    near = case.with_micro(case.micro * 2 if fits else case.micro // 2)
    within = fits == (outcome == "fits") or (near.micro > 0 and fits_in(near, capacity)[0] != fits)
    published = float(row["memory_gib"]) if row["memory_gib"] else None
    return Border(name, case, row["device"], outcome, published, peak, fits, within)


def case_of(row: dict[str, str]) -> Case:
    """ValueError if the row says too little to model it."""
    if not row["model"]:
        raise ValueError("encoders and encoder-decoders are not traced")
    return Case(
        row["case"],
        row["engine"],
        int(row["zero"] or 0),
        row["model"],
        int(row["world"]),
        int(row["micro"]),
        int(row["seq"]),
        int(row["accumulation"] or 1),
        row["recompute"],
        row["kernels"],
    )


def fits_in(case: Case, capacity: float) -> tuple[bool, CasePeak | None]:
    """Whether the predicted use is at most the capacity; the peak is not computed where states alone exceed it."""
    if engine_memory(case).resting + overhead_bytes(case) > capacity:
        return False, None
    peak = case_peak(case)
    return peak.used <= capacity, peak
