"""The command line: from the words that were typed to an exit code. Whatever is wrong with them is told at once."""

from __future__ import annotations

import errno
import importlib
import json
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator import arguments, folders, hardware, help_page, overrides, point_count, rules
from orchestrator.arguments import VERBS, Arguments
from orchestrator.cluster import ClusterKind
from orchestrator.deciding import Refused, Wishes, retry_states
from orchestrator.labels import label, sweep_name
from orchestrator.point import Point
from orchestrator.record_file import BadRecord, told
from orchestrator.schema import Device, RunConfig, root_limits, to_dict
from orchestrator.slurm_tools import SlurmError
from orchestrator.streams import complain, few, one_line, take_any_text
from orchestrator.strict import Broken, ConfigError, Refusal, build_parts
from orchestrator.worker.faults import Faults

if TYPE_CHECKING:
    from orchestrator.compose import Composition
    from orchestrator.sweep_command import SweepRequest

FAILED = 1
BAD_USAGE = 2
INTERRUPTED = 130
_OF_STREAMS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def _drop_unshown() -> None:
    """What cannot be printed, as on a full disk under stdout, is dropped: Python would complain again at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _end_quietly() -> int:
    """Whoever read our output has enough, as `| head` has. Python would complain once more at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _told(error: BadRecord | OSError) -> str:
    """One line; also of an error without a file's name, though every file of ours is named where it fails."""
    if isinstance(error, BadRecord) or error.filename is not None:
        return told(error)
    return f"standard output: {told(error)}" if error.errno in _OF_STREAMS else told(error)


def main(argv: Sequence[str]) -> int:
    """0: every point has a result. 1: at least one failed. 2: nothing was started, the words were wrong."""
    take_any_text()
    try:
        code = _carried_out(argv)
        sys.stdout.flush()
        return code
    except Refusal as refusal:
        return refuse(refusal.problems)
    except SlurmError as error:
        return refuse(["; ".join(str(error).splitlines())])
    except BrokenPipeError:
        return _end_quietly()
    except (BadRecord, OSError) as error:
        _drop_unshown()
        complain(f"error: {_told(error)}")
        return FAILED
    except MemoryError:
        complain("error: this process may have no more memory: raise its limit (ulimit -v)")
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def _carried_out(argv: Sequence[str]) -> int:
    if "--version" in argv:
        from orchestrator import provenance  # here: it imports what only a run needs

        print(f"zero-lab {provenance.version_of('zero-lab') or '(not installed: no version)'}")
        return 0
    if argv and argv[0] in VERBS:
        module = importlib.import_module(f"orchestrator.{VERBS[argv[0]]}")
        # What reads and steers sweeps shares one parser; the others have their own.
        return int(module.main(argv if VERBS[argv[0]] == "verbs" else argv[1:]))
    return _answer(arguments.split(argv))


def _answer(asked: Arguments) -> int:
    if "--help" in asked.flags:
        print(help_page.page(folders.CONF / "config.yaml", overrides.read_tree(asked.flags.get("--config-dir"))))
        return 0
    composition = composed(asked)
    if asked.shows:
        _show(asked)
    return _run(composition, asked)


def _show(asked: Arguments) -> None:
    from orchestrator import compose

    try:
        compose.show(asked)
    except compose.ComposeError as error:
        raise Refusal([str(error)]) from None


def composed(asked: Arguments) -> Composition:
    """The points of a line, not yet judged. Refusal tells everything that is wrong with the words."""
    folder = asked.flags.get("--config-dir")
    problems = [*asked.problems, *_folder_problems(folder)]
    # While a word is still being completed it is not yet right, and Hydra lists what it could become.
    if asked.shows_config or not asked.shows:
        tree = overrides.read_tree(folder)
        problems += overrides.check(asked.overrides, tree, multirun=asked.multirun, flags=asked.folders())
    if problems:
        raise Refusal(problems)
    from orchestrator import compose  # here: it imports Hydra, and the answers above are quicker without

    if asked.shows and not asked.shows_config:
        _show(asked)
    try:
        return compose.compose(asked)
    except compose.ComposeError as error:
        raise Refusal([str(error)]) from None


def _run(composition: Composition, asked: Arguments) -> int:
    os.umask(0o077)  # what runs write is the user's alone
    scene = here()
    # A cluster is sent points and left: one is a sweep of one.
    on_cluster = composition.points[0].values.get("cluster", {}).get("kind") == ClusterKind.slurm.value
    if composition.is_sweep or "--plan" in asked.flags or (on_cluster and scene.world is None):
        request = _sweep_request(composition, asked, scene)
        from orchestrator.sweep_command import run_sweep

        return run_sweep(request, scene.hardware)
    only_sweeps = ("--plan", "--fresh", "--detach", "--retry", "--prune", point_count.FLAG)
    if sweeping := [flag for flag in only_sweeps if flag in asked.flags]:
        raise Refusal([f"{' and '.join(sweeping)} belongs to a sweep: add -m, or leave it out"])
    points, problems = checked_points(composition, scene)
    if problems:
        raise Refusal(problems)
    _check_fault(points)
    _note_idle_gpus(scene, points[0].config)
    as_json = "--json" in asked.flags
    if scene.world is not None:
        if as_json:
            raise Refusal(["--json: ranks of torchrun or srun print none; the records have a result.json"])
        from orchestrator import job

        return job.join_from_environment(points[0])
    from orchestrator import prediction, slots
    from orchestrator.study import run_point

    if wrong := prediction.problems(points):
        raise Refusal(list(wrong.values()))
    if problems := slots.place_problems(points[0].config.output):
        raise Refusal(problems)

    return run_point(points[0], as_json=as_json)


def sweep_request(argv: Sequence[str]) -> tuple[SweepRequest, hardware.Hardware]:
    """A sweep as the words of a command line ask for it, and this machine. Refusal tells what is wrong with them."""
    asked = arguments.split(argv)
    scene = here()
    return _sweep_request(composed(asked), asked, scene), scene.hardware


def _sweep_request(composition: Composition, asked: Arguments, scene: rules.Scene) -> SweepRequest:
    from orchestrator import report
    from orchestrator.sweep_command import SweepRequest

    found, problems = judged(composition, scene)
    if scene.world is not None:
        problems.insert(0, "a sweep starts its own processes: run it without torchrun or srun")
    metric = composition.sweep.rank_by
    wishes = _wishes(asked)
    points = [one for one in found if isinstance(one, Point)]
    whole = [report.metric_problem(metric) if metric else None, _places_problem(points)]
    problems = [*filter(None, whole), *problems]
    if not points or scene.world is not None or any(whole):
        raise Refusal(problems)
    for problem in few(problems):
        complain(f"refused: {problem}")
    _check_fault(points)
    _note_idle_gpus(scene, points[0].config)
    if composition.sweep.prune in ("off", False) and "--prune" not in asked.flags:
        wishes = replace(wishes, prune=False)
    return SweepRequest(
        sweep_name(composition.axes, asked.overrides),
        tuple(found),
        tuple(asked.command()),
        wishes,
        metric,
        plan_only="--plan" in asked.flags,
        detach="--detach" in asked.flags,
        as_json="--json" in asked.flags,
    )


def _check_fault(points: Sequence[Point]) -> None:
    """Refusal where ZLAB_FAULT cannot be read, or can act in none of the points: its run would seem to pass a test."""
    try:
        fault = Faults.from_env()
    except ValueError as error:
        raise Refusal([str(error)]) from None
    measured = [(one.config.resources.ranks or 1, one.config.measure) for one in points]
    problems = [fault.problem(ranks, measure.warmup_steps + measure.steps) for ranks, measure in measured]
    if all(problems):
        raise Refusal(problems[:1])


def _places_problem(points: Sequence[Point]) -> str | None:
    """A sweep has one folder and one scheduler."""
    for key, values in (
        ("cluster", {str(one.config.cluster.kind) for one in points}),
        ("output", {one.config.output for one in points}),
    ):
        if len(values) > 1:
            return f"a sweep has one {key}, found {' and '.join(sorted(values))}      fix: one sweep for each"
    return None


def _wishes(asked: Arguments) -> Wishes:
    retry = asked.flags.get("--retry")
    try:
        states = retry_states(retry) if retry else frozenset()
    except ValueError as error:
        raise Refusal([str(error)]) from None
    return Wishes(fresh="--fresh" in asked.flags, retry=states, prune=asked.flags.get("--prune") != "off")


def here() -> rules.Scene:
    """This machine as it is found; Refusal where a launcher's environment makes no sense."""
    try:
        return scene_of(os.environ)
    except ConfigError as error:
        raise Refusal(list(map(str, error.broken))) from None


def scene_of(environ: Mapping[str, str]) -> rules.Scene:
    """This machine, and the world that torchrun or srun started, where one did."""
    found = hardware.detect(environ)
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return rules.Scene(found)
    names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK")
    wrong = [name for name in names if not environ.get(name, "1").isdigit()]
    if wrong:
        raise ConfigError([Broken(f"the environment's {name} must be a whole number", environ[name]) for name in wrong])
    world = int(environ["WORLD_SIZE"])
    return rules.Scene(found, world, int(environ.get("LOCAL_WORLD_SIZE", world)))


def judged(composition: Composition, scene: rules.Scene) -> tuple[list[Point | Refused], list[str]]:
    """The points, resolved or refused, and every broken rule with the number of points that it hits."""
    found: dict[str, Point | Refused] = {}
    hits: Counter[Broken] = Counter()
    for composed in composition.points:
        parts, broken = build_parts(RunConfig, composed.values)
        broken += root_limits(parts).broken + rules.check_parts(parts, scene)
        hits.update(dict.fromkeys(broken, 1))
        name = label(composed, composition.axes)
        if broken:
            found[f"refused {name} {composed.overrides}"] = Refused(name, composed.overrides, tuple(broken))
        else:
            config = rules.resolve(RunConfig(**parts), scene)
            # Two ways to say one configuration are one point: it is measured once.
            found.setdefault(json.dumps(to_dict(config), sort_keys=True), Point(name, config, composed.overrides))
    many = len(composition.points)
    lines = [f"{one}" + (f"      ({count} of {many} points)" if many > 1 else "") for one, count in hits.items()]
    return distinct(list(found.values())), lines


def distinct(points: Sequence[Point | Refused]) -> list[Point | Refused]:
    """The same points with labels of their own: words that two share are told apart by a number."""
    seen: Counter[str] = Counter()
    told = []
    for point in points:
        seen[point.label] += 1
        many = seen[point.label] > 1
        told.append(replace(point, label=f"{point.label}-{seen[point.label]}") if many else point)
    return told


def checked_points(composition: Composition, scene: rules.Scene) -> tuple[list[Point], list[str]]:
    """The points that break no rule, and the lines of `judged`."""
    found, lines = judged(composition, scene)
    return [one for one in found if isinstance(one, Point)], lines


def refuse(problems: Sequence[str]) -> int:
    """Tells every problem on stderr; the exit code of bad usage."""
    word = "error:"
    if sys.stderr.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb":
        word = f"\033[31m{word}\033[0m"
    # Started by torchrun or srun, every rank finds the same: one tells it.
    for problem in few(problems) if os.environ.get("RANK", "0") == "0" else ():
        print(f"{word} {one_line(problem)}", file=sys.stderr)
    print(f"nothing was started (exit {BAD_USAGE})", file=sys.stderr)
    return BAD_USAGE


def _note_idle_gpus(scene: rules.Scene, config: RunConfig) -> None:
    idle = scene.hardware.idle_gpus
    if idle and config.resources.device is Device.cpu:
        print(f"note: {idle} GPUs stay idle: the installed torch is built without CUDA", file=sys.stderr)


def _folder_problems(folder: str | None) -> list[str]:
    return [] if folder is None or Path(folder).is_dir() else [f"--config-dir: there is no folder '{folder}'"]
