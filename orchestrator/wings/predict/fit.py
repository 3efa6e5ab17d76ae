"""`zlab fit`: which settings of a model fit onto which GPUs, and with how large a micro-batch. Starts no run."""

from __future__ import annotations

import re
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from orchestrator import wings
from orchestrator.commands.verb_parser import VerbParser, add_json, verb_parser
from orchestrator.compose import arguments
from orchestrator.compose.line import composed
from orchestrator.config.schema import Device, MeasureKind, RunConfig
from orchestrator.config.strict import Refusal
from orchestrator.exit_codes import FAILED, INCOMPLETE, OK
from orchestrator.machine.hardware import memory_bytes
from orchestrator.planning.point import Point
from orchestrator.planning.points import distinct, judged
from orchestrator.planning.predictor import NOT_ASKED
from orchestrator.planning.rules.scene import here
from orchestrator.report.screen import Screen, make_console
from orchestrator.text.paths import program
from orchestrator.text.streams import complain, few
from orchestrator.text.units import many
from orchestrator.wings.kinds.kind import sample_of
from orchestrator.wings.predict import at_rest, counting_child, fit_estimator, fit_peers, memory_cache, step
from orchestrator.wings.predict import fit_rows as fit
from orchestrator.wings.predict.counting_child import Answer
from orchestrator.wings.predict.fit_page import Columns, FitPage, named
from orchestrator.wings.predict.fit_rows import Fit
from orchestrator.wings.predict.fit_words import TOKENS, Length, document, job_of, predicted, with_folder
from orchestrator.wings.predict.memory_cache import activations_key, units_key
from orchestrator.wings.predict.more_ranks import enough_ranks
from orchestrator.wings.predict.prediction import attention_note, gpu_bytes_here, overhead_of
from orchestrator.wings.predict.rough_time import offloads, without_offload
from orchestrator.wings.predict.step import MICRO, given_micro
from orchestrator.wings.predict.take import documents, of_machines
from orchestrator.wings.predict.target import Target, target_of
from orchestrator.wings.words.machine_names import NODES, RANKS, Machine, machines

# What is tried of each group that the command line leaves open. Combinations that a rule forbids are left out.
AXES = {
    "zero": "stage0,stage1,stage2,stage3",
    "offload": "none,optimizer_cpu,optimizer_param_cpu",
    "recompute": "none,by_operation,full",
    "loss": "full,tiled",
}
PLAIN = {"offload": "none", "recompute": "none", "loss": "full"}  # options that a label leaves out
SMALLEST = 2  # a batch of one is traced alone: torch treats dimensions of one differently
TRACED_TOKENS = 1 << 17  # of the largest micro-batch that is traced
TABLE = re.compile(r"(ranks|tp|sp)=([0-9]+(?:,[0-9]+)*)")
KEYS = {"ranks": RANKS, "tp": "parallel.tp", "sp": "parallel.sp"}  # that the columns of --table vary
NAME_GPU = "fix: name the GPU: hardware=a100_80gb"
NOT_COUNTED = "the activations cannot be counted"
MACHINES = ("hardware", RANKS, NODES, TOKENS)
FLAGS = ("--multirun", "--plan", "--config-dir", "--max-points")  # that a line of fit may have; all others start runs
# What depends on the micro-batch that fit finds, and what to do instead.
OWN_KEYS = {
    "batch.global_size": "it varies with the micro-batch      fix: batch.accumulation=N, or give batch.micro too",
}
# The end of `fit --help`; PROGRAM is replaced by how this program is started.
SETTINGS = """\
settings, as of a run; what is left open of zero, offload, recompute and loss is
tried, all else has a run's default (--help WORD: what a setting means):
  model=NAME       an option of conf/model, a FOLDER with a config.json (weights
                   are not needed), or a name of the hub that is in its cache
  hardware=2xNAME  two GPUs of a preset (--help hardware); 2xNAME,8xNAME: a table
                   over machines
  batch.seq=N      tokens of a sequence; 128 if it is not given
  batch.micro=N    whether this micro-batch fits; the largest if it is not given
  adapter=lora     trains adapters alone, with precision.weights=int4 beside a
                   model in 4 bits

example: PROGRAM fit model=llama2_7b hardware=8xa100_80gb batch.seq=4096"""


def main(argv: Sequence[str]) -> int:
    """Prints the table, one row's arithmetic, or a table over numbers. Returns 0, 1 if nothing fits, or 3 if rows are
    missing because they could not be counted."""
    asked, words = parser().parse_known_args(argv)
    overrides = [one for word in words for one in with_folder(word)]
    if asked.estimator is not None:
        if asked.table or asked.engine or asked.explain or asked.all:
            raise Refusal([f"{fit_estimator.FLAG} prints its own tables: leave out --table, --as, --explain and --all"])
        return fit_estimator.main(asked.estimator, words, as_json=asked.json)
    if asked.steps and (asked.explain is None or asked.engine):
        raise Refusal(["--steps is of one row of ours      fix: --explain ROW --steps, without --as"])
    over = _columns(asked.table)
    job, overrides = job_of(overrides)
    line = _name_of(words_that_count(words), asked.table, asked.explain)
    with counting_child.started_ahead(needed=memory_cache.stored(line) is None):
        code = _answer(asked, overrides, over, job)
    if code != INCOMPLETE:
        memory_cache.store(line, {"answered": True})
    return code


def _name_of(words: Collection[str], *more: str | None) -> str:
    """The name under which the cache knows that what such a line counts has been counted before."""
    return f"line-{memory_cache.hash_of(sorted(words), more)}"


def words_that_count(words: Sequence[str]) -> set[str]:
    """Those that may decide what is counted: flags and machines do not, but for what is counted for CPU ranks."""
    return {word for word in words if not word.startswith(("-", *MACHINES))}


def _answer(asked: Namespace, overrides: Sequence[str], over: Columns | None, job: Length | None) -> int:
    if asked.engine is not None:
        if over:
            raise Refusal(["--table and --as cannot be asked for together"])
        points = [fit_peers.as_engine(asked.engine, one) for one in _points(overrides, None)]
        answers = answers_for(points, quiet=asked.json)
        counted = _counted(points, answers)
        found = fit_peers.rows_as(counted, answers)
        code = fit_peers.show(found, counted, overrides, asked.explain, as_json=asked.json)
        return code if len(counted) == len(points) else INCOMPLETE
    points = _points(overrides, over)
    known = answers_for(points, quiet=asked.json)
    if why := at_rest.experts(points, known):
        at_rest.refuse_flags({"table": over, "explain": asked.explain})
        return at_rest.show(Screen(make_console()), at_rest.rows(points, known), why, as_json=asked.json)
    asked_points = points if asked.explain is None else [named(points, asked.explain)]
    settle = fit.all_settled if asked.json or asked.all or asked.explain is not None else fit.settled
    fits = fits_of(asked_points, quiet=True, settle=settle)  # answers are known, and what is to be said of them was
    enough = {} if over or asked.explain is not None else enough_ranks(points, fits, fits_of)
    choices = of_machines(fits)
    if asked.json:
        speeds, taken = {one.label: predicted(one) for one in fits}, documents(choices, job)
        print(document(points[0].config.model.name, fits, speeds, take=taken, enough_ranks=enough))
    else:
        typed = arguments.split(overrides)
        folder = typed.flags.get("--config-dir")
        flags = [] if folder is None else ["--config-dir", folder]
        page = FitPage(Screen(make_console()), typed.overrides, flags, job)
        if asked.explain is not None and asked.steps:
            page.ledger(fits[0])
        elif asked.explain is not None:
            page.explain(fits[0])
        elif over:
            page.by_number(fits, over, show_all=asked.all)
        else:
            page.rows(fits, choices, enough, show_all=asked.all)
    if len(fits) < len(asked_points):
        return INCOMPLETE
    return OK if any(one.micro for one in fits) else FAILED


def parser() -> VerbParser:
    parser = verb_parser(
        "fit",
        "Which stage, offload, recomputation and loss fit onto which GPUs, and with how\n"
        "large a micro-batch: predicted without a GPU, and without a run.",
    )
    parser.usage = (
        f"{program()} fit [-h] [group=option | key=value ...]\n"
        "  [--all] [--explain ROW [--steps]] [--table ranks=1,2,4,8]\n"
        "  [--table tp=1,2,4] [--table sp=1,2,4] [--as ENGINE] [--estimator P,L] [--json]"
    )
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.epilog = SETTINGS.replace("PROGRAM", program())
    parser.add_argument("--all", action="store_true", help="every row, also those that another row makes needless")
    parser.add_argument("--explain", metavar="ROW", help="the arithmetic of one row of the table, by its label")
    parser.add_argument(
        "--steps",
        action="store_true",
        help="with --explain: what each step of a note on ZeRO holds and sends, and a step here",
    )
    parser.add_argument(
        "--table",
        metavar="ranks=N,N,...",
        help="the largest micro-batch for several numbers of ranks, of parallel.tp, or of parallel.sp",
    )
    parser.add_argument(
        "--as", dest="engine", choices=sorted(wings.ENGINES), help="by the byte rules of another engine"
    )
    parser.add_argument(
        fit_estimator.FLAG,
        metavar="P,L",
        help="the tables of DeepSpeed's estimators for P parameters, L of them in the largest layer, such as 2783M,65M",
    )
    add_json(parser)
    return parser


def _columns(table: str | None) -> Columns | None:
    if table is None:
        return None
    match = TABLE.fullmatch(table)
    if match is None or any(int(number) == 0 for number in match[2].split(",")):
        fixes = "fix: --table ranks=1,2,4,8   or   --table tp=1,2,4   or   --table sp=1,2,4"
        raise Refusal(
            [f"--table: expected numbers of ranks, of parallel.tp or of parallel.sp, found '{table}'      {fixes}"]
        )
    return Columns(match[1], sorted({int(number) for number in match[2].split(",")}))


def _points(overrides: Sequence[str], over: Columns | None) -> list[Point]:
    """The combinations of the settings that the command line leaves open, without those that a rule forbids."""
    given = names(overrides)
    problems = [f"{key}: {why}" for key, why in OWN_KEYS.items() if key in given and MICRO not in given]
    key = over and KEYS[over.name]
    if over and MICRO in given:
        problems.append(f"--table shows the largest micro-batch      fix: leave {MICRO} out, or --table")
    if key and (key in given or (key != RANKS and "parallel" in given)):
        problems.append(f"--table varies {key}      fix: leave one of them out")
    if "resources.device=cuda" in overrides and "hardware" not in given and not here().hardware.gpus:
        problems.append(
            "resources.device=cuda: no GPU is here      fix: name one that a plan can assume: hardware=a100_80gb"
        )
    flags = arguments.split(overrides).flags
    wrong = sorted(set(flags) - set(FLAGS))
    problems += [f"fit starts no run and has no {flag}      see: {program()} fit --help" for flag in wrong]
    lines = machines(overrides, flags.get("--config-dir"))
    if len(lines) > 1 and over:
        problems.append("--table is of one machine      fix: name one in hardware=NAME, or leave --table out")
    if problems:
        raise Refusal(problems)
    axes = [f"{group}={options}" for group, options in AXES.items() if group not in given]
    if over is None:
        return points_of(lines, axes)
    (_, overrides), key_given = lines[0], NODES in given
    gpus = _gpus_of_a_node(overrides) if over.name == "ranks" and not key_given else None
    found: list[Point] = []
    for number in over.numbers:
        nodes = [f"{NODES}={-(-number // gpus)}"] if gpus and number > gpus else []
        found += valid_points([*overrides, *axes, f"{key}={number}", *nodes], f"-{over.name}{number}")
    return found


def points_of(lines: Sequence[Machine], axes: Sequence[str]) -> list[Point]:
    """The valid points of each machine's line with these axes; of several machines labels end with the machine's
    name."""
    found = [valid_points([*words, *axes], f"-{name}" if name else "") for name, words in lines]
    return [point for points in found for point in points]


def names(words: Sequence[str]) -> set[str]:
    """The groups and keys that the words set."""
    return {word.partition("=")[0].lstrip("+") for word in words}


def _gpus_of_a_node(overrides: Sequence[str]) -> int | None:
    """The GPUs of a node of the described hardware; None if it is this machine."""
    values = composed(arguments.split(["--multirun", "--plan", *overrides])).points[0].values
    gpus = (values.get("hardware") or {}).get("gpus")
    return gpus if isinstance(gpus, int) and gpus > 0 else None


def valid_points(words: Sequence[str], column: str = "") -> list[Point]:
    """The points of the words that no rule refuses, with labels of options only where they are not the plain ones."""
    composition = composed(arguments.split(["--multirun", "--plan", *words]))
    own = [f"{key}: {why}" for key, why in OWN_KEYS.items() if key in composition.axes]  # from a file of sweeps/
    if own and MICRO not in {*composition.axes, *names(words)}:
        raise Refusal(own)
    found, problems = judged(composition, replace(here(), plan_only=True, needs_weights=False))
    points = []
    for point in found:
        if isinstance(point, Point):
            options = dict(word.lstrip("+").partition("=")[::2] for word in point.overrides)
            # Ranks on a CPU compute in host memory, so that nothing is gained by keeping states there.
            is_idle = point.config.resources.device is Device.cpu and "offload" not in _given(words)
            if is_idle and options.get("offload") != "none":
                continue
            axes = [key for key in composition.axes if key in options]  # a point of a list of sweeps may lack some
            varied = [key for key in axes if key not in ("zero", *PLAIN)]
            named = [options[key] for key in PLAIN if key in axes and options[key] != PLAIN[key]]
            named += [f"{key.rpartition('.')[2]}{options[key]}" if "." in key else options[key] for key in varied]
            label = "-".join([f"stage{point.config.zero.stage}", *named])
            points.append(replace(point, label=re.sub(r"[^\w.+-]+", "_", label) + column))
    if not points:
        # What all points break is wrong with the line; the rest is wrong with options that it did not ask for.
        ending = f"      ({len(composition.points)} of {len(composition.points)} points)"
        raise Refusal([one.removesuffix(ending) for one in problems if one.endswith(ending)] or problems)
    refuse_evaluations(points, "fit and choose predict")
    return [point for point in distinct(points) if isinstance(point, Point)]


def refuse_evaluations(points: Sequence[Point], what: str) -> None:
    """Refusal if one of the points is an evaluation. what: the verb, and what it does with steps of training."""
    if any(point.config.measure.kind is MeasureKind.eval for point in points):
        weights = "-m --plan measure=eval zero=stage0,stage3"
        why = f"{what} steps of training, and measure=eval has none"
        raise Refusal([f"{why}      fix: measure=quick, or for the bytes of the weights: {program()} {weights}"])


def _given(words: Sequence[str]) -> dict[str, str]:
    """The groups that the words set to options other than those of AXES."""
    pairs = dict(word.lstrip("+").partition("=")[::2] for word in words)
    return {key: value for key, value in pairs.items() if AXES.get(key) != value}


def answers_for(points: Sequence[Point], *, quiet: bool) -> dict[str, Answer]:
    """The shapes and traces of the points, by key. Refusal if a model cannot be built."""
    configs = [point.config for point in points]
    with Screen(make_console(on_stderr=True)).passing(quiet=quiet) as tell:
        answers = memory_cache.answers(configs, _traced_for(points), tell, together=True)
    problems = dict.fromkeys(answer["problem"] for answer in answers.values() if "problem" in answer)
    if problems:
        raise Refusal(list(problems))
    if not quiet and (note := next(filter(None, map(attention_note, answers.values())), "")):
        complain(f"note: {note}")
    return answers


def _traced_for(points: Sequence[Point]) -> list[RunConfig]:
    """Of each family the micro-batches that are traced: those that are given, else the smallest and the largest."""
    found: dict[str, tuple[RunConfig, set[int]]] = {}
    for point in points:
        config, given = point.config, given_micro(point.config, point.overrides)
        micros = (given,) if given else (1, SMALLEST, max(TRACED_TOKENS // sample_of(config).tokens, 2 * SMALLEST))
        found.setdefault(activations_key(config, any_micro=True), (config, set()))[1].update(micros)
    return [one for config, micros in found.values() for one in step.traced([config], sorted(micros))]


def fits_of(
    points: Sequence[Point], *, quiet: bool, settle: Callable[[Sequence[Fit]], list[Fit]] = fit.all_settled
) -> list[Fit]:
    """How large a micro-batch of each point fits. settle: which rows are settled, and their order. Points that cannot
    be predicted are reported on stderr. Refusal if none can be."""
    answers = answers_for(points, quiet=quiet)
    memories = step.Memories(answers, recalls=True)
    gpu_bytes, host_bytes = gpu_bytes_here(), memory_bytes()
    fits: list[Fit] = []
    counted = _counted(points, answers)
    asks_for_plain = all(offloads(point.config) for point in counted)  # else their rows are in the table
    for point in counted:
        target = target_of(point.config, gpu_bytes, host_bytes)
        if target.device_bytes is None:
            fix = "fix: resources.memory_mib=4000, what a rank has" if target.device is Device.cpu else NAME_GPU
            raise Refusal([f"the memory of a rank's device is not known      {fix}"])

        def row(config: RunConfig, point: Point = point, target: Target = target) -> Fit:
            memory = memories.of(config)
            assert memory is not None, "a point that was counted has its shapes"
            group, overhead = _group(point.overrides), overhead_of(config)
            micro = given_micro(config, point.overrides)
            found = fit.fit_of(point.label, point.overrides, memory, target, overhead, group, given=micro)
            assert found is not None, "a point that was counted has its traces"
            return found

        found = row(point.config)
        fits.append(replace(found, plain=row(without_offload(point.config)).settled()) if asks_for_plain else found)
    return settle(fits)


def _counted(points: Sequence[Point], answers: Mapping[str, Answer]) -> list[Point]:
    """The points all of whose counts are there. The others are reported on stderr. Refusal if there are none."""
    counted: list[Point] = []
    left_out: dict[str, list[str]] = {}
    for point in points:
        why = "" if "units" in answers.get(units_key(point.config), {}) else NOT_ASKED
        unknown = (answers.get(activations_key(one), {"unknown": NOT_ASKED}) for one in _traced_for([point]))
        reasons = [*(one["unknown"] for one in unknown if "unknown" in one), *filter(None, [why])]
        if reasons:
            left_out.setdefault(reasons[0], []).append(point.label)
        else:
            counted.append(point)
    if not counted:
        raise Refusal([f"{NOT_COUNTED}: {reason}" for reason in left_out])
    for reason, labels in left_out.items():
        rows = f"{len(labels)} of {many(len(points), 'row')}"
        complain(f"warning: {rows} left out, {NOT_COUNTED}: {reason}      rows: {' '.join(few(labels))}")
    return counted


def _group(overrides: Sequence[str]) -> tuple[str, ...]:
    return tuple(word for word in overrides if word.partition("=")[0] not in AXES)
