"""Decides whether the rows of a comparison did the same work as plain PyTorch: what differs has no place. Pure.

[Note: bounds]
The spread is measured: the plain run trains the same steps in other ways (micro-batches of another size; with 16 bits
also in fp32 and in autocast) and records the largest distance of these at each step. With one more engine E, reference
R and exact numbers X, |E - R| <= |E - X| + |X - R|: two terms of the spread's size. The third is for its being the
largest of one to three samples. Rounding is amplified from step to step, so the bound of a step is that of the largest
spread up to it; the first five steps share theirs, since one distance may be small by chance.

In fp32 the only variant, micro-batches of another size, begins one rounding apart. Ranks that add up in another order
begin as many roundings apart as the least bound has. Training amplifies both in the same way, so the multiple is that
much larger.

No bound is below that of fp32. A loss: 1e-6, 16 roundings of 2^-24, as it is a sum of the same terms in another order.
A norm: 60 roundings, since a sum of n terms by halves rounds log2(n) times, and both sums in it, over tokens and over
elements, have fewer than 2^30 terms. The spread of llama_tiny in fp32 is 6e-8 at step 1 and 9e-7 at step 20.

In 16 bits the norms of equal trainings part within 20 steps, to twice the size, while their losses stay within 1 %.
Where plain PyTorch's own norms are more than 5 % apart, three of them no longer bound a fourth, so that from there on
losses alone are judged.

Without a plain run there is no spread, so the first five steps are judged by roundings of the dtype: two of a loss, one
in each row, and eight of a norm, whose terms have come through twice as many operations. Later steps may be 16 times as
far apart.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from orchestrator.report.entry import Entry
from zero_runtime.precision import ITEMSIZE_BYTES

REFERENCE = "plain"
STEPS = 20  # whose tokens, updates, losses and norms are compared: the warm-up of a comparison, so that none is timed
MULTIPLE, ALIKE_STEPS = 3.0, 5  # of the spread; steps at the beginning that share theirs
ROUNDING = {"bf16": 2.0**-9, "fp16": 2.0**-12, "fp32": 2.0**-24}  # relative
IN_FP32 = {"loss": 16, "norm": 60}  # roundings between two equal rows before training amplifies them
LEAST = {"loss": 1e-6, "norm": 60 * ROUNDING["fp32"]}
ALONE = {"loss": 2, "norm": 8}  # roundings, without a plain run
PARTED = 0.05  # relative distance of norms from which they are not judged
GROWTH = 16  # of the distance of two equal trainings in the steps after; that of llama_tiny in fp32 grows 15-fold by 20
REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce")
STATES = ("params", "grads", "master")  # the components of result["dtypes"] that are not moments or messages
LATE = " after the last timed step"  # of what differs there
# Settings that decide what is computed. Those of other groups decide where and how, but for the interpreter: another
# torch rounds otherwise, so each has a reference of its own.
GROUPS = ("seed", "model", "adapter", "data", "optimizer", "scheduler")
KEYS = (("batch", "global_size"), ("batch", "seq"), ("measure", "kind"), ("measure", "warmup_steps"),
        ("measure", "steps"), ("engine", "python"))  # fmt: skip
DTYPES = ("tf32", "param", "reduce", "accumulate", "master", "loss_scale", "initial_scale_power", "keep_dtype")


@dataclass(frozen=True)
class WorkVerdict:
    """Whether a row did the same work as the row `basis`: equal if it has no differences and nothing is unknown.

    basis: the label of the plain run, or of another row where there is none; empty for the row itself.
    """

    differences: tuple[str, ...]
    unknown: str = ""
    basis: str = ""

    @property
    def is_equal(self) -> bool:
        return not self.differences and not self.unknown


def verdicts(entries: Sequence[Entry]) -> dict[str, WorkVerdict]:
    """The verdict on every row that has a result, by its label."""
    found: dict[str, WorkVerdict] = {}
    bases = {key: _basis(rows) for key, rows in _by_work(entries).items()}
    for entry in entries:
        if entry.result is None:
            continue
        basis = bases.get(work_key(entry.config))
        if not _is_counted(entry):
            found[entry.label] = WorkVerdict((), "its work was not counted to the end: run it again with this sweep")
        elif basis is None or basis is entry:
            found[entry.label] = WorkVerdict(_differences(entry, None))
        else:
            found[entry.label] = WorkVerdict(_differences(entry, basis), basis=basis.label)
    # A row with which others are compared, and which is no plain run, has been compared itself if one of them is equal.
    confirmed = {verdict.basis for verdict in found.values() if verdict.is_equal}
    for basis in bases.values():
        if _kind(basis) != REFERENCE and basis.label not in confirmed and found[basis.label].is_equal:
            found[basis.label] = WorkVerdict((), "there is no reference to compare its work with")
    return found


def work_key(config: Mapping[str, Any]) -> str:
    """Equal for two configurations exactly if their runs must do the same work, which is judged together."""
    precision = config.get("precision", {})
    parts = [
        [config.get(name) for name in GROUPS],
        [config.get(group, {}).get(key) for group, key in KEYS],
        [precision.get(key) for key in DTYPES],
    ]
    return json.dumps(parts, sort_keys=True, default=str)


def bounds(config: Mapping[str, Any], basis: Mapping[str, Any], what: str) -> list[float]:
    """The largest relative distance of a step's `loss` or `norm` from that of the basis, a result's `work`, by step.

    See [Note: bounds].
    """
    steps, spread = len(basis["steps"]), (basis.get("spread") or {}).get(what)
    if not spread:
        alone = max(LEAST[what], ALONE[what] * ROUNDING[str(config["precision"]["param"])])
        return [alone if step < ALIKE_STEPS else GROWTH * alone for step in range(steps)]
    multiple = MULTIPLE * (IN_FP32[what] if config["precision"]["param"] == "fp32" else 1)
    largest = list(accumulate(spread, max))
    alike = [largest[min(max(step, ALIKE_STEPS - 1), steps - 1)] for step in range(steps)]
    return [math.inf if what == "norm" and one > PARTED else max(LEAST[what], multiple * one) for one in alike]


def _by_work(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        if _is_counted(entry):
            found.setdefault(work_key(entry.config), []).append(entry)
    return found


def _is_counted(entry: Entry) -> bool:
    work = (entry.result or {}).get("work") or {}
    return bool(work.get("steps") and work.get("late"))


def _basis(rows: Sequence[Entry]) -> Entry:
    """The plain run; without one, a row of zero-lab's own, whose dtypes its ranks have audited; else the first."""
    order = (REFERENCE, "zero")
    return min(rows, key=lambda row: order.index(_kind(row)) if _kind(row) in order else len(order))


def _kind(entry: Entry) -> str:
    return str(entry.config.get("engine", {}).get("kind", "zero"))


# ---- what was trained on what ------------------------------------------------------------------------------------


def _differences(entry: Entry, basis: Entry | None) -> tuple[str, ...]:
    """List the differences in the first steps, and those only in the steps after the last timed one. basis: the row to
    compare with, if there is another."""
    assert entry.result is not None
    work, other = entry.result["work"], None if basis is None else (basis.result or {})["work"]
    late = work["late"]
    early_texts = _wrong_dtypes(entry, entry.result.get("dtypes") or {}, work["messages"])
    late_texts = _wrong_dtypes(entry, late["dtypes"], late["messages"])
    if late["messages"] != work["messages"]:
        late_texts.append("sends other messages")
    if other is not None:
        early_texts += ["other first weights"] if work["weights"] != other["weights"] else []
        limits = {what: bounds(entry.config, other, what) for what in ("loss", "norm")}
        early_texts += _different_steps(work, other, limits)
        late_texts += _different_steps(late, other["late"], limits)
    return tuple(dict.fromkeys([*early_texts, *(f"{text}{LATE}" for text in late_texts if text not in early_texts)]))


def _different_steps(
    own: Mapping[str, Any], other: Mapping[str, Any], limits: Mapping[str, Sequence[float]]
) -> Iterator[str]:
    """List the differences in steps that both rows began with the first weights."""
    if own["trained"] != other["trained"]:
        count, wanted = own["trained"][0], other["trained"][0]
        yield f"trains {count} parameters, not {wanted}" if count != wanted else "trains other parameters"
    yield from _different_counts(own["steps"], other["steps"])
    for what, limit in limits.items():
        yield from _too_far(own["steps"], other["steps"], what, limit)


def _different_counts(own: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The first difference of each kind. Micro-batches may differ: they are how a step is cut, not what it does."""
    if len(own) != len(other):
        yield f"{len(own)} steps, not {len(other)}"
    for what, phrase in (
        ("tokens", "other tokens"),
        ("sequences", "{} sequences, not {}"),
        ("updates", "{} updates, not {}"),
    ):
        for step, (one, two) in enumerate(zip(own, other, strict=False), start=1):
            if one[what] == two[what]:
                continue
            skipped = what == "updates" and not one[what]
            yield f"update {step} skipped" if skipped else f"{phrase.format(one[what], two[what])} at step {step}"
            break


def _too_far(
    own: Sequence[Mapping[str, Any]], other: Sequence[Mapping[str, Any]], what: str, limits: Sequence[float]
) -> Iterator[str]:
    """The first step whose number is not within its limit of the other's. An engine that does not clip may know no
    norm."""
    for step, (one, two, limit) in enumerate(zip(own, other, limits, strict=False), start=1):
        apart = relative(one[what], two[what])
        if apart is not None and not apart <= limit:  # also if it is not a number
            amount = f"{apart:.0e}".replace("e-0", "e-") if math.isfinite(apart) else "everything"
            yield f"{what} off by {amount} at step {step}"
            return


def relative(one: float | None, other: float | None) -> float | None:
    """How far a number is from another; None if one of them is not known."""
    if one is None or other is None:
        return None
    return abs(one - other) / abs(other) if other else abs(one)


# ---- dtypes ------------------------------------------------------------------------------------------------------


def _wrong_dtypes(entry: Entry, dtypes: Mapping[str, Any], sent: Mapping[str, Any]) -> list[str]:
    """What a row keeps or sends in fewer bits than its configuration asks for. The ranks of zero-lab's own rows have
    compared theirs with more rules, and would have failed. dtypes: bytes by component and dtype; sent: messages."""
    if _kind(entry) == "zero":
        return []
    config, texts = entry.config, list[str]()
    precision = config["precision"]
    several = config["batch"]["accumulation"] > 1
    asked = {"grads": precision["accumulate" if several else "reduce"]}
    # Weights that are computed with are masters, too, if there are no others.
    asked["master" if dtypes.get("master") else "params"] = precision["master"]
    moments = [name for name in dtypes if name not in STATES]
    asked |= dict.fromkeys(moments, config["optimizer"].get("state_dtype", "fp32"))
    for component, dtype in asked.items():
        found = dtypes.get(component, {})
        # Beside their sum, the gradients of a backward have the dtype in which it computes.
        if (component != "grads" or dtype not in found) and (narrow := _narrower(found, dtype)):
            shown = {"grads": "gradients", "params": "masters", "master": "masters"}.get(component, "moments")
            texts.append(f"{shown} in {narrow}")
    reduced = {dtype: 1 for kind in REDUCTIONS for dtype in sent.get(kind, {})}
    if narrow := _narrower(reduced, precision["reduce"]):
        texts.append(f"gradients sent in {narrow}")
    return texts


def _narrower(found: Mapping[str, int], asked: str) -> str:
    """The first dtype of fewer bytes than the one that is asked for; empty if there is none."""
    least = ITEMSIZE_BYTES.get(asked, 1)  # type: ignore[call-overload]
    return next((dtype for dtype in found if ITEMSIZE_BYTES.get(dtype, 4) < least), "")  # type: ignore[call-overload]
