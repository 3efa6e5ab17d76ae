"""`zlab fit`: which settings of a model fit onto which GPUs, and with how large a micro-batch. Starts no run."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace

from orchestrator.commands.verb_parser import VerbParser, add_json, verb_parser
from orchestrator.compose import arguments
from orchestrator.compose.line import composed
from orchestrator.config.strict import Refusal, nearest
from orchestrator.plan import fit, memory_cache, step
from orchestrator.plan.fit import Fit
from orchestrator.plan.point import Point
from orchestrator.plan.points import judged
from orchestrator.plan.prediction import gpu_bytes_here, overhead_of, target_here
from orchestrator.plan.rules.scene import here
from orchestrator.report.screen import Screen, make_console
from orchestrator.report.summary import Row, Table
from orchestrator.text.paths import program
from orchestrator.text.streams import complain
from orchestrator.text.units import count, many, size

# What is tried of each group that the command line leaves open. Combinations that a rule forbids are left out.
AXES = {
    "zero": "stage0,stage1,stage2,stage3",
    "offload": "none,optimizer_cpu,optimizer_param_cpu",
    "recompute": "none,by_operation,full",
    "loss": "full,tiled",
}
SMALLEST = 2  # a batch of one is traced alone: torch treats dimensions of one differently
TRACED_TOKENS = 1 << 17  # of the largest micro-batch that is traced
TABLE_RANKS = re.compile(r"ranks=([0-9]+(?:,[0-9]+)*)")
RANKS = "resources.ranks"


def main(argv: Sequence[str]) -> int:
    """Prints the table, one row's arithmetic, or a table over numbers of ranks. Returns 0, or 1 if nothing fits."""
    asked, overrides = parser().parse_known_args(argv)
    ranks = _ranks(asked.table)
    points = _points(overrides, ranks)
    fits = _fits(points, quiet=asked.json)
    if asked.json:
        print(json.dumps([one.to_dict() for one in fits], ensure_ascii=False))
    else:
        screen = Screen(make_console())
        if asked.explain is not None:
            _explain(screen, _named(fits, asked.explain))
        else:
            _show(screen, fits, overrides, over_ranks=bool(ranks))
    return int(not any(one.micro for one in fits))


def parser() -> VerbParser:
    parser = verb_parser("fit", __doc__.partition(": ")[2].replace("\n", " ") if __doc__ else "")
    parser.usage = f"{program()} fit [group=option | key=value ...] [--explain ROW] [--table ranks=1,2,4,8] [--json]"
    parser.add_argument("--explain", metavar="ROW", help="the arithmetic of one row of the table, by its label")
    parser.add_argument("--table", metavar="ranks=N,N,...", help="the same for several numbers of ranks")
    add_json(parser)
    return parser


def _ranks(table: str | None) -> list[int]:
    if table is None:
        return []
    match = TABLE_RANKS.fullmatch(table)
    if match is None or "0" in match[1].split(","):
        raise Refusal([f"--table: expected numbers of ranks, such as ranks=1,2,4,8, found '{table}'"])
    return [int(number) for number in match[1].split(",")]


def _points(overrides: Sequence[str], ranks: Sequence[int]) -> list[Point]:
    """The combinations of the settings that the command line leaves open, without those that a rule forbids."""
    given = {word.partition("=")[0].lstrip("+") for word in overrides}
    if "batch.micro" in given:
        raise Refusal(["batch.micro: fit finds the largest; leave it out, or give it to a plan: --plan"])
    axes = [f"{group}={options}" for group, options in AXES.items() if group not in given]
    axes += [f"{RANKS}={','.join(map(str, ranks))}"] if ranks else []
    asked = arguments.split(["--multirun", "--plan", *overrides, *axes])
    composition = composed(asked)
    found, problems = judged(composition, replace(here(), plan_only=True))
    points = [point for point in found if isinstance(point, Point)]
    if not points:
        raise Refusal(problems)
    return points


def _fits(points: Sequence[Point], *, quiet: bool) -> list[Fit]:
    configs = [point.config for point in points]
    high = max(TRACED_TOKENS // configs[0].batch.seq, 2 * SMALLEST)
    wanted = step.traced(configs, (1, SMALLEST, high))
    answers = memory_cache.answers(configs, wanted, None if quiet else complain)
    problems = dict.fromkeys(answer["problem"] for answer in answers.values() if "problem" in answer)
    if problems:
        raise Refusal(list(problems))
    fits, gpu_bytes, memories = [], gpu_bytes_here(), step.Memories(answers)
    for point in points:
        memory = memories.of(point.config)
        target = target_here(point.config, gpu_bytes)
        if memory is None:
            continue
        if target.device_bytes is None:
            raise Refusal(
                ["the memory of the device is not known: name the GPU      fix: hardware=a100_80gb (see conf/hardware)"]
            )
        limit = target.device_bytes // target.ranks_share
        found = fit.fit_of(point.label, point.overrides, memory, limit, overhead_of(point.config))
        if found is not None:
            fits.append(found)
    if not fits:
        reasons = {memories.unknown(config) for config in wanted} - {""}
        raise Refusal([f"the activations cannot be counted: {reason}" for reason in reasons] or ["no answer"])
    return fit.order(fits)


def _named(fits: Sequence[Fit], label: str) -> Fit:
    exact = [one for one in fits if one.label == label]
    if exact:
        return exact[0]
    near = nearest(label, [one.label for one in fits])
    hint = f" Did you mean '{near}'?" if near else ""
    raise Refusal([f"there is no row '{label}'.{hint}      rows: {' '.join(one.label for one in fits)}"])


def _show(screen: Screen, fits: Sequence[Fit], overrides: Sequence[str], *, over_ranks: bool) -> None:
    first = fits[0]
    screen.rows([Row("fits into", _into(first, over_ranks=over_ranks))])
    screen.console.print()
    screen.table(_table(fits))
    screen.console.print()
    screen.say(
        "micro: the largest micro-batch of a rank, in sequences; 3-4: with the most and the least that libraries take"
    )
    screen.say("peak, of it: of the tensors at the worst moment of a step at that micro-batch, or at 1 if none fits")
    fitting = [one for one in fits if one.micro]
    rows = []
    if fitting:
        line = " ".join(["fit", *overrides, "--explain", fitting[0].label])
        rows = [Row("explain", f"{program()} {line}"), Row("run", f"{program()} {_command(fitting[0])} --plan")]
    else:
        screen.warn(f"nothing fits; the nearest needs {size(min(one.used_bytes[1] for one in fits))}")
    screen.closing(rows)


def _into(one: Fit, *, over_ranks: bool) -> str:
    node, ranks = one.config.hardware, one.config.resources.ranks or 1
    where = node.name if node.is_described else "this machine"
    taken = f", of which CUDA, cuBLAS and NCCL take {size(one.overhead.least)} to {size(one.overhead.most)}"
    many_ranks = "" if over_ranks else f", {many(ranks, 'rank')}"
    return f"{where}{many_ranks}: {size(one.limit_bytes)} for a rank{taken if one.overhead.most else ''}"


def _table(fits: Sequence[Fit]) -> Table:
    header = ("row", "micro", "tokens", "peak", "states", "activations", "host", "sent", "largest part")
    rows = []
    for one in fits:
        states = sum(one.peak.states.values())
        rows.append(
            (
                one.label,
                _micro(one),
                count(one.tokens if one.micro else 0),
                size(one.peak.total),
                size(states),
                size(one.peak.activations),
                size(one.host_bytes + one.scratch_bytes) if one.host_bytes + one.scratch_bytes else "-",
                size(one.sent_bytes) if one.sent_bytes else "-",
                one.binds,
            )
        )
    return Table(header, tuple(rows))


def _micro(one: Fit) -> str:
    if one.capped:
        return f"{one.micro}+"
    return str(one.micro) if one.micro == one.most_micro else f"{one.micro}-{one.most_micro}"


def _command(one: Fit) -> str:
    return " ".join([*(word for word in one.overrides if word != "--multirun"), f"batch.micro={one.micro}"])


def _explain(screen: Screen, one: Fit) -> None:
    """The arithmetic of one row: each part of the peak, what libraries take, and what is left."""
    least, most = one.used_bytes
    at = f"micro-batch {one.micro}" if one.micro else "micro-batch 1, which does not fit"
    screen.say(f"{one.label}, {at}: the most bytes exist {one.peak.when}", "bold")
    screen.rows([Row(name, size(nbytes)) for name, nbytes in fit.parts(one.peak)])
    rows = [Row("tensors", size(one.peak.total))]
    if one.overhead.most:
        libraries = f"{size(one.overhead.least)} to {size(one.overhead.most)}"
        rows.append(Row("CUDA, cuBLAS and NCCL", f"{libraries} ({one.overhead.communicators} communicators)"))
    rows.append(Row("used", size(least) if least == most else f"{size(least)} to {size(most)}"))
    rows.append(Row("limit", f"{size(one.limit_bytes)}: {size(one.limit_bytes - most)} are left"))
    if one.host_bytes:
        rows.append(Row("host memory", f"{size(one.host_bytes)} of each rank"))
    if one.scratch_bytes:
        rows.append(Row("scratch file", f"{size(one.scratch_bytes)} of each rank"))
    rows.append(Row("sent", f"{size(one.sent_bytes)} by each rank in a step"))
    screen.rows(rows)
    screen.closing([Row("run", f"{program()} {_command(one)} --plan")] if one.micro else [])
