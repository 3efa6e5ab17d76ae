"""What `zlab fit` shows: the table of rows that fit, a table over numbers of ranks, and the arithmetic of one row."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from orchestrator.config import pretrained
from orchestrator.config.hardware import GpuNode
from orchestrator.config.lossy import lossy_words
from orchestrator.config.schema import Batch, Device, RunConfig, to_dict
from orchestrator.config.strict import Refusal, nearest
from orchestrator.planning.point import Point
from orchestrator.report.screen import Screen
from orchestrator.report.summary import Row, Table
from orchestrator.text.paths import program
from orchestrator.text.units import ABSENT, count, digits, many, significant, size
from orchestrator.wings.kinds.kind import sample_of
from orchestrator.wings.predict import fit_arithmetic, more_ranks, note_ledger, take
from orchestrator.wings.predict import fit_rows as fit
from orchestrator.wings.predict.fit_rows import Fit
from orchestrator.wings.predict.fit_words import Length, with_less
from orchestrator.wings.predict.moments import all_moments
from orchestrator.wings.predict.more_ranks import Enough
from orchestrator.wings.predict.prediction import hardware_name
from orchestrator.wings.predict.speed import NOT_SHOWN, ROUGH, Speed
from orchestrator.wings.predict.step import with_micro
from orchestrator.wings.predict.take import Taken
from orchestrator.wings.profile import costs
from orchestrator.wings.words.machine_names import values

# How a count of torch differs from the tensors that are counted here (device_overhead.py).
WORKSPACES = "of tensors; torch.cuda.max_memory_allocated also counts cuBLAS's workspaces, 64 MiB on Hopper"
# Columns in the order in which a narrow terminal leaves them out.
DROPPED = (
    "tokens/step",
    "images/step",
    "activations",
    "states",
    "reserved",
    "MFU",
    "largest part",
    "closed form",
    "what exists",
)
MACHINES = ("resources.ranks=", "resources.nodes=", "parallel.tp=", "parallel.sp=")
COLUMNS = {
    "ranks": "the number of ranks",
    "tp": "the ranks that hold slices of one model (parallel.tp)",
    "sp": "the ranks that hold parts of one sequence (parallel.sp)",
}
FEW = 12  # rows at a given micro-batch that are all shown
VERDICTS = {
    "tight": "exceeds memory once the overhead of torch's allocator is counted",
    "perhaps": "if CUDA, cuBLAS and NCCL take the least of their range",
}
# What options do, by the words for them in a row's label.
IN_LABELS = {
    "by_operation": "cheap operations are computed again in the backward (recompute=by_operation)",
    "full": "every block is computed again in the backward (recompute=full)",
    "tiled": "the loss is computed for some tokens at a time (loss=tiled)",
}
UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


class Columns(NamedTuple):
    """What the columns of a table are: ranks, or those of a tensor- or sequence-parallel group (tp, sp); and their
    numbers."""

    name: str
    numbers: list[int]

    def of(self, one: Fit) -> int:
        """The column of a row's cell."""
        parallel = one.config.parallel
        return {"ranks": one.config.ranks, "tp": parallel.tp, "sp": parallel.sp}[self.name]

    def row(self, one: Fit) -> str:
        """The label without the number."""
        return one.label.rpartition(f"-{self.name}")[0]


class FitPage:
    """The output of one command. words, flags: the overrides as typed and the flags that name a folder of options, for
    the commands that it proposes."""

    def __init__(
        self, screen: Screen, words: Sequence[str], flags: Sequence[str] = (), job: Length | None = None
    ) -> None:
        self._screen, self._words, self._flags, self._job = screen, list(words), list(flags), job

    def rows(self, fits: Sequence[Fit], choices: Sequence[Taken], enough: Enough, *, show_all: bool) -> None:
        """The rows that fit, how many are not shown, which to take, and how many ranks need no offload."""
        best = fit.best(fits)
        given = all(one.given for one in fits)
        shown = list(fits) if show_all or (given and len(fits) <= FEW) else best
        self._screen.rows(_heads(fits))
        if shown:
            unit = _unit(max(one.peak.total for one in shown))
            or_one = ", or at 1" if any(not one.micro for one in shown) else ""
            at = "at the given micro-batch" if given else f"at the largest micro-batch that fits{or_one}"
            self._say(f"bytes of one rank in {unit[0]}, {at}")
            table = _table(shown, unit)
            self._screen.table(table)
            for note in [*_notes(shown), *_host_notes(shown)]:
                self._screen.say(note)
            self._screen.rows(_words(shown))
        self._close(fits, best, shown)
        if answer := [*self._taken(choices), *more_ranks.rows(enough)]:
            self._screen.console.print()
            self._screen.rows(answer)
        self._propose([take.fastest_machine(choices).first.fit] if choices else [_nearest(fits)])

    def by_number(self, fits: Sequence[Fit], over: Columns, *, show_all: bool) -> None:
        """One row for each setting, one column for each number: the largest micro-batch."""
        best = fit.best(fits)
        shown = list(fits) if show_all else best
        self._screen.rows(_head(fits[0], fits, over_ranks=over.name == "ranks"))
        names = dict.fromkeys(over.row(one) for one in shown)
        fits = [one.settled() if over.row(one) in names else one for one in fits]
        cells = {(over.row(one), over.of(one)): one.verdict if one.tight else micro_cell(one) for one in fits}
        self._say(f"the largest micro-batch of a rank, by {COLUMNS[over.name]}")
        rows = tuple((name, *(cells.get((name, number), ABSENT) for number in over.numbers)) for name in names)
        self._screen.table(Table(("row", *map(str, over.numbers)), rows))
        self._screen.rows([Row("tight", VERDICTS["tight"])] * ("tight" in cells.values()))
        if left := len({over.row(one) for one in fits} - set(names)):
            self._say(f"{many(left, 'row')} hidden: others fit as much with no more work (--all)")
        first = (best or [_nearest(fits)])[0]
        machines = [word for word in first.overrides if word.startswith(MACHINES) and word not in self._words]
        self._propose([replace(first, label=over.row(first))], machines)

    def explain(self, one: Fit) -> None:
        """The arithmetic of one row: each part of the peak, what libraries take, and what is left."""
        at = f"micro-batch {one.counted}{'' if one.micro else ', which does not fit'}"
        of = fit_arithmetic.bytes_of_parameter(one)
        named = ", ".join(f"{nbytes:.10g} of {name}" for name, nbytes in of.items())
        whole = Row("bytes", f"{sum(of.values()):.10g} of a parameter before they are sharded: {named}")
        self._screen.rows([*_head(one), Row("letters", fit_arithmetic.letters(one)), whole])
        self._say(f"{one.label}, {at}: the most bytes exist {one.peak.when}")
        header = ("part", "arithmetic", "closed form", "at that moment")
        parts = [
            (name, text, ABSENT if expected is None else size(expected), size(counted))
            for name, text, expected, counted in fit_arithmetic.walk(one)
        ]
        total = ("tensors", "", "", size(one.peak.total))
        self._screen.table(Table(header, (*parts, total), names=2, drops=DROPPED))
        self._screen.console.print()
        self._screen.rows(_after(one))
        if moments := _outside(one):
            self._say("outside a step: the most bytes of one rank")
            self._screen.table(moments)
        self._propose_run([one] if one.micro else [])

    def ledger(self, one: Fit) -> None:
        """The steps of the note on ZeRO beside those of the row."""
        found = note_ledger.steps(one)
        self._screen.rows(_head(one))
        self._say(f"{one.label}, micro-batch {one.counted}: a rank's step")
        header = ("step", "does", "the note", "its bytes", "here")
        self._screen.table(Table(header, tuple(note_ledger.rows(found)), names=3))
        self._screen.console.print()
        self._screen.rows([Row(*note) for note in note_ledger.notes(one, found)])
        self._screen.closing([Row("explain", f"{program()} {self._line('--explain', one.label)}")])

    def _say(self, text: str) -> None:
        self._screen.console.print()
        self._screen.say(text, "bold")

    def _close(self, fits: Sequence[Fit], best: Sequence[Fit], shown: Sequence[Fit]) -> None:
        not_fitting = [one for one in fits if not one.micro]
        needless = len(fits) - len(not_fitting) - len(best)
        rows = []
        if needless and len(shown) < len(fits):
            hidden = f"{many(needless, 'row')}: no larger batch and no less work than a row above (--all)"
            rows.append(Row("hidden", hidden))
        if not_fitting:
            nearest = _nearest(not_fitting)
            others = f", {nearest.label}" if len(not_fitting) > 1 else ""
            rows.append(Row("do not fit", f"{len(not_fitting)}; the nearest{others}: {nearest.reason}"))
            hosts = [one for one in not_fitting if one.host_lacks and one is not nearest]
            if hosts:
                rows.append(Row("", f"{len(hosts)} for the host's memory: {hosts[0].label} {hosts[0].reason}"))
        if rows:
            self._screen.console.print()
            self._screen.rows(rows)
        for one in [one for one in fits if one.needless][:1]:
            self._screen.say(f"the offload of {one.label} is not needed: {one.needless}")
        if any(one.capped for one in shown):
            self._screen.say("+: the largest that was tried")

    def _taken(self, choices: Sequence[Taken]) -> list[Row]:
        """Which row to take, which is the second, and what decided; none if nothing fits."""
        if len(choices) == 1:
            return take.rows(choices[0], self._job)
        return take.rows_of_machines(choices, self._job) if choices else []

    def _propose(self, best: Sequence[Fit], more: Sequence[str] = ()) -> None:
        explained = [Row("explain", f"{program()} {self._line(*more, '--explain', one.label)}") for one in best[:1]]
        if not any(one.micro for one in best) and (less := with_less(self._words)):
            explained.append(
                Row("less", f"{program()} {self._line(*less)}     # trains adapters beside frozen weights")
            )
        self._propose_run(best, explained)

    def _propose_run(self, best: Sequence[Fit], rows: Sequence[Row] = ()) -> None:
        runs = [one for one in best[:1] if one.micro and _can_be_planned(one.config)]
        plans = [Row("plan", f"{program()} {shlex.join([*_settings(one), *self._flags, '--plan'])}") for one in runs]
        self._screen.closing([*rows, *plans])

    def _line(self, *more: str) -> str:
        return shlex.join(["fit", *self._words, *self._flags, *more])


AnyRow = TypeVar("AnyRow", bound=Fit | Point)


def named(rows: Sequence[AnyRow], label: str) -> AnyRow:
    """The row with this label. Refusal, with the nearest label, if there is none."""
    for one in rows:
        if one.label == label:
            return one
    near = nearest(label, [one.label for one in rows])
    hint = f" Did you mean '{near}'?" if near else ""
    raise Refusal([f"there is no row '{label}'.{hint}      rows: {' '.join(one.label for one in rows)}"])


def _heads(fits: Sequence[Fit]) -> list[Row]:
    """The model and each machine."""
    firsts: dict[GpuNode, Fit] = {}
    for one in fits:
        firsts.setdefault(one.config.hardware, one)
    found = [_head(one, fits) for one in firsts.values()]
    return [row for number, rows in enumerate(found) for row in rows if not number or row.name == "machine"]


def _lossy(fits: Sequence[Fit]) -> list[Row]:
    found = [lossy_words(to_dict(one.config)) for one in fits]
    words = list(dict.fromkeys(word for one in found for word in one))
    if not words:
        return []
    where = "in every row" if all(set(one) == set(words) for one in found) else "in the rows that are named by them"
    return [Row("lossy", f"{', '.join(words)} {where}")]


def _head(one: Fit, beside: Sequence[Fit] = (), *, over_ranks: bool = False) -> list[Row]:
    """The model and the machine. beside: all rows of the table, if there is one."""
    config, node = one.config, one.config.hardware
    numel = one.memory.full_numel(trainable=True) + one.memory.full_numel(trainable=False)
    model = f"{config.model.name}, {count(numel)} parameters, {sample_of(config).words}"
    precision = f"parameters {config.precision.dtypes.param}, {config.optimizer.rule.kind}"
    accumulation = config.batch.accumulation
    precision += f", {accumulation} micro-batches a step" if accumulation > 1 else ""
    where = node.name if node.is_described else "this machine"
    on_cpu, is_open = config.resources.device is Device.cpu, "batch.seq" not in values(one.overrides)
    at = "" if over_ranks else f"{many(config.resources.ranks, 'rank')} on {many(config.resources.nodes, 'node')}, "
    taken = f"; CUDA, cuBLAS and NCCL take {size(one.overhead.least)} to {size(one.overhead.most)}, the most is counted"
    memory = "" if over_ranks and on_cpu else f"{size(one.limit_bytes)} for a rank"
    rows = [
        Row("model", f"{model}; {precision}"),
        Row("machine", f"{where}: {at}{memory}{taken if one.overhead.most and not over_ranks else ''}"),
    ]
    if is_open and config.batch.seq == Batch().seq and not sample_of(config).is_image:
        rows.append(Row("length", f"{config.batch.seq} tokens are the default; for your own length: batch.seq=2048"))
    rows += _lossy(beside or [one])
    if on_cpu and not node.is_described:
        rows.append(Row("note", "these are CPU ranks; name a GPU to see what fits there: hardware=a100_80gb"))
    return rows


def _nearest(fits: Sequence[Fit]) -> Fit:
    """Of rows that do not fit, the one with the lowest peak among those that the host has enough memory for."""
    return min(fits, key=lambda one: (one.host_lacks, one.peak.total))


def _unit(largest: int) -> tuple[str, int]:
    return next((unit for unit in UNITS if largest >= unit[1]), UNITS[-1])


def _table(fits: Sequence[Fit], unit: tuple[str, int]) -> Table:
    counted = "images/step" if sample_of(fits[0].config).is_image else "tokens/step"
    header: tuple[str, ...] = ("row", "micro", "fits", counted, "tokens/s", "MFU", "at rest", "peak", "states")
    header += ("activations", "reserved", "host", "of node", "scratch", "sent", "largest part")
    configs = [to_dict(one.config) for one in fits]
    cost = costs.column_name({price.currency for config in configs if (price := costs.price_of(config))})
    header = (*header[:6], cost, *header[6:])

    def sized(nbytes: int) -> str:
        return digits(nbytes / unit[1]) if nbytes else ABSENT

    rows: list[tuple[str, ...]] = [
        (
            one.label,
            micro_cell(one),
            one.verdict if one.given or one.verdict != "yes" else ABSENT,
            take.amount(with_micro(one.config, one.micro)).partition(" ")[0] if one.micro else ABSENT,
            ABSENT if (speed := one.speed(hardware_name(one.config))) is None else speed.text,
            ABSENT if speed is None else speed.mfu_text,
            _cost(config, speed),
            sized(one.resting_bytes * bool(one.given)),
            sized(one.peak.total),
            sized(sum(one.peak.states.values())),
            sized(one.peak.activations),
            ABSENT if one.reserved is None else sized(one.reserved.reserved),
            sized(one.host_bytes),
            sized(one.host_of_node * bool(one.given)),
            sized(one.scratch_bytes),
            sized(one.sent_bytes),
            one.binds if one.micro else "host memory" if one.host_lacks else one.binds,
        )
        for one, config in zip(fits, configs, strict=True)
    ]
    # Without offload, on CPU ranks, not known, or no micro-batch was given.
    for name in ("scratch", "of node", "host", "reserved", "at rest", cost, "MFU", "tokens/s", "fits"):
        at = header.index(name)
        if all(row[at] == ABSENT for row in rows):
            header = (*header[:at], *header[at + 1 :])
            rows = [(*row[:at], *row[at + 1 :]) for row in rows]
    return Table(header, tuple(rows), drops=DROPPED)


def _cost(config: Mapping[str, Any], speed: Speed | None) -> str:
    """What a billion tokens would cost; marked if the speed is a rough estimate."""
    cost = costs.predicted_cost(config, speed.shown if speed else None)
    return ABSENT if cost is None or speed is None else f"{ROUGH if speed.rough else ''}{significant(cost)}"


def _notes(fits: Sequence[Fit]) -> list[str]:
    """What the estimated speeds in the table are."""
    speeds = [speed for one in fits if (speed := one.speed(hardware_name(one.config))) is not None and speed.rough]
    notes = []
    if any(one.within and not one.outside for one in speeds):
        estimated = "estimated from the data sheet; 80 % of published runs fall in this range"
        notes.append(f"tokens/s: of all ranks; {ROUGH} {estimated}")
        notes.append("MFU: at the middle of the range, 6 FLOP for each parameter and token, of the peak")
    if any(one.within is None and not one.outside for one in speeds):
        notes.append(
            f"{ROUGH} without a range: no published run with an offload to base one on; it only orders such rows"
        )
    unlike = {one.outside for one in speeds} - {""}
    notes += [f"{NOT_SHOWN}: no published run with {why} to base a speed on" for why in unlike]
    return [*notes, "see docs/speed.md"] if notes else []


def _host_notes(fits: Sequence[Fit]) -> list[str]:
    """What rows need of a host whose memory is not known, so that it was not compared."""
    rows = sorted((one for one in fits if one.host_unknown), key=lambda one: one.host_of_node)
    if not rows:
        return []
    needs = " to ".join(dict.fromkeys(size(one.host_of_node) for one in (rows[0], rows[-1])))
    why = f"{needs} of host memory for {many(rows[0].ranks_per_node, 'rank')}: hardware.host_memory_gib is not known"
    return [f"{why}      fix: hardware.host_memory_gib=N, what a node has"]


def _words(fits: Sequence[Fit]) -> list[Row]:
    """What the words of the table mean that need it."""
    labelled = {part for one in fits for part in one.label.split("-")}
    found = [Row(word, text) for word, text in IN_LABELS.items() if word in labelled]
    if any(one.sent_bytes for one in fits):
        found.append(Row("sent", "what one rank sends to the others in a step"))
    return found + [
        Row(f"fits {word}", text) for word, text in VERDICTS.items() if word in {one.verdict for one in fits}
    ]


def _can_be_planned(config: RunConfig) -> bool:
    """Whether `--plan` takes the model: for described GPUs a config.json suffices, this machine needs weights."""
    return pretrained.problem(config.model, needs_weights=not config.hardware.is_described) is None


def micro_cell(one: Fit) -> str:
    if one.given:
        return str(one.given)
    return f"{one.micro}{'+' * one.capped}" if one.micro else ABSENT


def _settings(one: Fit) -> list[str]:
    """The words of a run of the row."""
    words = [word for word in one.overrides if not word.startswith(("-", "batch.micro="))]
    return [*words, f"batch.micro={one.micro}"]


def _after(one: Fit) -> list[Row]:
    """What follows from the peak: the memory in use, the limit, what the next micro-batch needs, other memory."""
    least, most = one.used_bytes
    rows = [Row("at rest", f"{size(one.resting_bytes)} between two steps")]
    if one.overhead.most:
        libraries = f"{size(one.overhead.least)} to {size(one.overhead.most)}"
        communicators = many(one.overhead.communicators, "communicator")
        rows.append(Row("libraries", f"{libraries}: CUDA, cuBLAS and {communicators} of NCCL"))
    if one.reserved is not None:
        reserved = size(one.reserved.reserved)
        rows.append(Row("allocated", f"{size(one.peak.total)} {WORKSPACES}"))
        rows.append(Row("reserved", f"{reserved} by torch's allocator with expandable segments, as in runs"))
    used = dict.fromkeys((size(least), size(most)))
    rows.append(Row("used", " to ".join(used) + ", reserved and libraries" * (one.reserved is not None)))
    rows.append(limit_row(one, most))
    if one.micro and not one.given and one.memory.peak(one.micro + 1) is not None:
        need = one.at(one.micro + 1).used_bytes[1]
        rows.append(Row("one more", f"micro-batch {one.micro + 1} would use up to {size(need)}"))
    if one.host_bytes:
        rows.append(host_row(one, "; hardware.host_memory_gib is not known" * one.host_unknown))
    if one.needless:
        rows.append(Row("not needed", f"the offload: {one.needless}"))
    if one.scratch_bytes:
        rows.append(Row("scratch file", f"{size(one.scratch_bytes)} of each rank"))
    if one.sent_bytes:
        rows.append(Row("sent", f"{size(one.sent_bytes)} by each rank in a step: {fit_arithmetic.sent(one)}"))
    if one.reason:
        rows.append(Row("does not fit", one.reason))
    return rows


def limit_row(one: Fit, used: int) -> Row:
    """The limit, and the bytes that `used` leaves of it."""
    left = one.limit_bytes - used
    spare = f"{size(left)} are left" if left >= 0 else f"{size(-left)} too few"
    return Row("limit", f"{size(one.limit_bytes)}: {spare}")


def host_row(one: Fit, told: str = "") -> Row:
    """Name what the row offloads, and how much of it."""
    limit = f" of {size(one.host_limit_bytes)}" if one.host_limit_bytes is not None else ""
    node = f"{one.ranks_per_node} ranks of a node: {size(one.host_of_node)}{limit}"
    return Row("host memory", f"{size(one.host_bytes)} of each rank; {node}{told}")


def _outside(one: Fit) -> Table | None:
    """The moments outside of steps. The host's bytes are in addition to the device's, also on a CPU."""
    header = ("moment", "what exists", "device", "host", "host of a node")
    rows = []
    for moment in all_moments(one.memory):
        of_node = moment.host * (1 if moment.alone else one.ranks_per_node)
        too_much = [f"more than {size(one.limit_bytes)}"] * (moment.device + one.overhead.most > one.limit_bytes)
        if one.host_limit_bytes is not None and of_node > one.host_limit_bytes:
            too_much.append(f"more than the node's {size(one.host_limit_bytes)}")
        cells = [size(count) if count else ABSENT for count in (moment.device, moment.host, of_node)]
        rows.append((moment.name, "; ".join([moment.why, *too_much]), *cells))
    return Table(header, tuple(rows), names=2, drops=DROPPED) if rows else None
