"""The ledger of a step (`zlab fit --explain ROW --steps`): what a note on ZeRO says that each of its steps holds and
sends, beside the bytes of a step here. Pure.

The note's Φ is the number of parameters, K the bytes of a master weight and its optimizer's states, N the number of
ranks. It has 16-bit parameters and gradients, and counts what a rank sends in parameters, without the factor (N-1)/N of
a ring. Here that factor is in the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from orchestrator.config.strict import Refusal
from orchestrator.text.units import count, many, size
from orchestrator.wings.predict.fit_arithmetic import psi
from orchestrator.wings.predict.fit_rows import Fit
from orchestrator.wings.predict.step import with_micro
from zero_runtime.plan import Partition
from zero_runtime.predict.memory.counted_unit import GATHERED, GRADS, OPTIMIZER, PARAMS, WHOLE_GRADS
from zero_runtime.predict.memory.step_memory import StatesReplay, replay_states

HALF, K = 2, 12  # bytes of a 16-bit number, and of an fp32 master with Adam's two moments
HOLDS, SENDS = "holds", "sends"


class Step(NamedTuple):
    """One step of the note. does: holds or sends; empty for neither. formula, note: the note's closed form and its
    bytes. here: bytes of a rank in a step of this runtime, for `holds` the most at any moment."""

    what: str
    does: str = ""
    formula: str = ""
    note: int = 0
    here: int = 0


def steps(fit: Fit) -> list[Step]:
    """The note's steps for the stage of a row. Refusal for what the note does not describe."""
    config = fit.config
    if config.parallel.group > 1 or config.zero.outer_sharding is not None or config.zero.shard_ranks is not None:
        raise Refusal(["--steps: the note shards over all ranks      fix: parallel=none zero.shard_ranks=null"])
    plan, phi, ranks = config.zero.plan, psi(fit), config.data_ranks
    *gathered, reduced = _sent(fit)
    most = partial(_most, _replay(fit))
    part = "/N" if plan.optimizer is Partition.SHARDED else ""
    own = ranks if part else 1
    begin = [
        Step("fp32 parameters and the optimizer's states", HOLDS, f"KΦ{part}", K * phi // own, most(OPTIMIZER)),
    ]
    grads = most(GRADS, WHOLE_GRADS)
    if plan.params is Partition.SHARDED:
        return [
            *begin,
            Step("16-bit parameters, its own part", HOLDS, "2Φ/N", HALF * phi // ranks, most(PARAMS)),
            Step("all-gather of the parameters", SENDS, "Φ", HALF * phi, gathered[0]),
            Step("forward; what is not its own is dropped", HOLDS, "", 0, most(GATHERED)),
            Step("all-gather of the parameters", SENDS, "Φ", HALF * phi, gathered[1]),
            Step("backward: gradients of its own batch", HOLDS, "2Φ/N", HALF * phi // ranks, grads),
            Step("reduce-scatter of the gradients", SENDS, "Φ", HALF * phi, reduced),
            Step("update of its own part"),
        ]
    half = [Step("16-bit parameters", HOLDS, "2Φ", HALF * phi, most(PARAMS))]
    if plan.optimizer is not Partition.SHARDED:
        backward = Step("forward and backward: gradients of its own batch", HOLDS, "2Φ", HALF * phi, grads)
        sent = Step("all-reduce of the gradients", SENDS, "2Φ", 2 * HALF * phi, reduced)
        return [*begin, *half, backward, sent, Step("update of all parameters")]
    split = plan.grads is Partition.SHARDED
    held = HALF * phi // ranks if split else HALF * phi
    return [
        *begin,
        *half,
        Step("forward and backward: gradients of its own batch", HOLDS, "2Φ/N" if split else "2Φ", held, grads),
        Step("reduce-scatter of the gradients", SENDS, "Φ", HALF * phi, reduced),
        Step("update of its own part"),
        Step("all-gather of the parameters", SENDS, "Φ", HALF * phi, sum(gathered)),
    ]


def rows(found: Sequence[Step]) -> list[tuple[str, ...]]:
    """The cells of the ledger: number, step, what it does, the note's formula, its bytes, and the bytes here."""
    return [
        (
            f"{number} {one.what}",
            one.does or "-",
            one.formula or "-",
            size(one.note) if one.note else "-",
            size(one.here) if one.does else "-",
        )
        for number, one in enumerate(found, 1)
    ]


def notes(fit: Fit, found: Sequence[Step]) -> list[tuple[str, str]]:
    """What is said below: the sums of what is sent, why it differs, and the theory of another topology."""
    phi, ranks, dtypes = psi(fit), fit.config.data_ranks, fit.config.precision.dtypes
    note, here = (sum(getattr(one, name) for one in found if one.does == SENDS) for name in ("note", "here"))
    elements = note // (HALF * phi)
    server = f"2Φ = {size(2 * HALF * phi)} of each worker, 2NΦ = {size(2 * ranks * HALF * phi)} of the server"
    return [
        ("letters", f"Φ = {count(phi)} trained parameters, N = {many(ranks, 'rank')}, K = {K} bytes"),
        ("sent", f"{elements}Φ = {size(note)} by the note; {size(here)} here, with the ring's (N-1)/N"),
        ("dtypes", f"gradients are summed in {dtypes.accumulate}, sent in {dtypes.reduce}; the note's are in 16 bits"),
        ("a server", f"instead of the ring, by the note: {server}, whose bandwidth is the limit"),
    ]  # fmt: skip


def _replay(fit: Fit) -> StatesReplay:
    part = fit.memory.part(fit.counted)
    assert part is not None, "a row has the trace of its micro-batch"
    return replay_states(part.linear.trace, fit.memory.units, fit.memory.rules, prefetch=fit.config.zero.prefetch)


def _most(replay: StatesReplay, *names: str) -> int:
    """The most bytes of these components together at any moment of a step."""
    levels = [replay.start, *replay.marks, replay.step]
    moments = [moment for level in levels for moment in (level.at_highest, level.at_left)]
    return max(sum(moment.get(name, 0) for name in names) for moment in moments)


def _sent(fit: Fit) -> tuple[int, int, int]:
    """Bytes that a rank sends in a step: gathers of forwards, all other gathers, and reductions."""
    memory = replace(fit.memory, config=with_micro(fit.config, fit.counted))
    forward = memory.gathered_bytes(at_most=fit.config.batch.accumulation)
    gathers = memory.gathered_bytes()
    return forward, gathers - forward, memory.sent_bytes() - gathers
