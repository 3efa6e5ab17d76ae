"""`zlab fit`: which settings of a model fit onto which GPUs, and with how large a micro-batch. Starts no run."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from orchestrator.commands.verb_parser import VerbParser, add_json, verb_parser
from orchestrator.compose import arguments
from orchestrator.compose.line import composed
from orchestrator.config.schema import Device, RunConfig
from orchestrator.config.strict import Refusal
from orchestrator.plan import fit, memory_cache, step
from orchestrator.plan.fit import Fit
from orchestrator.plan.point import Point
from orchestrator.plan.points import judged
from orchestrator.plan.prediction import overhead_of
from orchestrator.plan.rules.scene import here
from orchestrator.plan.target import Target
from orchestrator.report.screen import Screen, make_console
from orchestrator.report.summary import Row, Table
from orchestrator.text.paths import program
from orchestrator.text.streams import complain
from orchestrator.text.units import count, digits, many, size

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
    found, problems = judged(composition, here())
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
    fits = []
    for point in points:
        memory, target = step.memory_of(point.config, answers), limits_of(point.config)
        if memory is None:
            continue
        found = fit.fit_of(point.label, point.overrides, memory, target.share, overhead_of(point.config))
        if found is not None:
            fits.append(found)
    if not fits:
        reasons = {step.unknown(config, answers) for config in wanted} - {""}
        raise Refusal([f"the activations cannot be counted: {reason}" for reason in reasons] or ["no answer"])
    return fit.order(fits)
