"""The command line: from the words that were typed to an exit code. Whatever is wrong with them is told at once."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator import arguments, folders, hardware, help_page, overrides, rules
from orchestrator.arguments import Arguments
from orchestrator.labels import label, sweep_name
from orchestrator.point import Point
from orchestrator.schema import Device, RunConfig, root_limits
from orchestrator.strict import Broken, ConfigError, build_parts

if TYPE_CHECKING:
    from orchestrator.compose import Composition

EXPORT = "export-weights"
IO_BENCH = "io-bench"
BAD_USAGE = 2
INTERRUPTED = 130


def console() -> None:
    """The command `zlab`."""
    sys.exit(main(sys.argv[1:]))


def main(argv: Sequence[str]) -> int:
    """0: every point has a result. 1: at least one failed. 2: nothing was started, the words were wrong."""
    try:
        if argv[:1] == [EXPORT]:
            from orchestrator import export

            return export.main(argv[1:])
        if argv[:1] == [IO_BENCH]:
            from orchestrator import io_bench

            return io_bench.main(argv[1:])
        return _answer(arguments.split(argv))
    except KeyboardInterrupt:
        return INTERRUPTED


def _answer(asked: Arguments) -> int:
    folder = asked.flags.get("--config-dir")
    tree = overrides.read_tree(folder)
    if "--help" in asked.flags:
        print(help_page.page(folders.CONF / "config.yaml", tree))
        return 0
    problems = [*asked.problems, *_folder_problems(folder)]
    # While a word is still being completed it is not yet right, and Hydra lists what it could become.
    if asked.shows_config or not asked.shows:
        problems += overrides.check(asked.overrides, tree, multirun=asked.multirun)
    if problems:
        return refuse(problems)
    from orchestrator import compose  # here: it imports Hydra, and the answers above are quicker without

    if asked.shows and not asked.shows_config:
        compose.show(asked)
    try:
        composition = compose.compose(asked)
    except compose.ComposeError as error:
        return refuse([str(error)])
    if asked.shows:
        compose.show(asked)
    return _run(composition, asked)


def _run(composition: Composition, asked: Arguments) -> int:
    try:
        scene = scene_of(os.environ)
    except ConfigError as error:
        return refuse(list(map(str, error.broken)))
    points, problems = checked_points(composition, scene)
    if scene.world is not None and composition.is_sweep:
        problems.insert(0, "a sweep starts its own processes: run it without torchrun or srun")
    if problems:
        return refuse(problems)
    _note_idle_gpus(scene, points[0].config)
    if scene.world is not None:
        from orchestrator import job

        return job.join_from_environment(points[0])
    from orchestrator.study import run_points

    name = sweep_name(composition.axes, asked.overrides) if composition.is_sweep else None
    return run_points(points, sweep_name=name, output=Path(points[0].config.output))


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


def checked_points(composition: Composition, scene: rules.Scene) -> tuple[list[Point], list[str]]:
    """The points, resolved, or every broken rule with the number of points that it hits."""
    points: list[Point] = []
    hits: Counter[Broken] = Counter()
    for composed in composition.points:
        parts, broken = build_parts(RunConfig, composed.values)
        broken += root_limits(parts).broken + rules.check_parts(parts, scene)
        hits.update(dict.fromkeys(broken, 1))
        if not broken:
            config = rules.resolve(RunConfig(**parts), scene)
            # Two ways to say one configuration are one point: its folder can be written once only.
            if all(config != point.config for point in points):
                points.append(Point(label(composed, composition.axes), config, composed.overrides))
    many = len(composition.points)
    lines = [f"{one}" + (f"      ({count} of {many} points)" if many > 1 else "") for one, count in hits.items()]
    return points, lines


def refuse(problems: Sequence[str]) -> int:
    """Tells every problem on stderr; the exit code of bad usage."""
    word = "error:"
    if sys.stderr.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb":
        word = f"\033[31m{word}\033[0m"
    # Started by torchrun or srun, every rank finds the same: one tells it.
    for problem in problems if os.environ.get("RANK", "0") == "0" else ():
        print(f"{word} {problem}", file=sys.stderr)
    print(f"nothing was started (exit {BAD_USAGE})", file=sys.stderr)
    return BAD_USAGE


def _note_idle_gpus(scene: rules.Scene, config: RunConfig) -> None:
    idle = scene.hardware.idle_gpus
    if idle and config.resources.device is Device.cpu:
        print(f"note: {idle} GPUs stay idle: the installed torch is built without CUDA", file=sys.stderr)


def _folder_problems(folder: str | None) -> list[str]:
    return [] if folder is None or Path(folder).is_dir() else [f"--config-dir: there is no folder '{folder}'"]
