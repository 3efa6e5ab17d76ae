"""`zlab export RUN`: a point as files with which its engine, or that of --to, runs it without this program."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from orchestrator import wings
from orchestrator.commands import named_sweep, verbs
from orchestrator.commands.verb_parser import VerbParser, add_json, add_output, verb_parser
from orchestrator.compose import arguments
from orchestrator.compose.line import composed
from orchestrator.config.engine import EngineKind
from orchestrator.config.schema import MeasureKind, RunConfig, from_dict
from orchestrator.config.strict import ConfigError, Refusal
from orchestrator.exit_codes import OK
from orchestrator.planning.point import Point
from orchestrator.planning.points import judged
from orchestrator.planning.rules.scene import here
from orchestrator.records import sweep_record
from orchestrator.records.record_file import require_json
from orchestrator.records.run_record import AttemptPaths
from orchestrator.report.screen import Screen, make_console
from orchestrator.report.summary import Row
from orchestrator.text.paths import program, shown
from orchestrator.wings.foreign import ddp_export, deepspeed_export, deepspeed_loop, fsdp2_export
from orchestrator.wings.foreign.exported import JSON_FILE, LINES_FILE, Exported, refuse
from orchestrator.wings.foreign.importing import OURS
from orchestrator.wings.foreign.point_words import words_of_point

EXPORTED = "exported"


def main(argv: Sequence[str]) -> int:
    """Writes the files. Refusal: there is no such point, or the other stack cannot run it; nothing was written."""
    asked, more = parser().parse_known_args(argv)
    name, config = _point([*([] if asked.run is None else [asked.run]), *more], asked.output, asked.sweep)
    if config.measure.kind is MeasureKind.eval:
        raise Refusal([f"{name}: measure=eval trains nothing that another stack could run      fix: measure=quick"])
    if config.steps() is None:
        problem = f"{name}: the number of steps of train.epochs depends on the data, which are not exported"
        raise Refusal([f"{problem}      fix: train.max_steps=1000 train.epochs=null"])
    to = asked.to or _own_stack(name, config)
    made = WRITERS[to](config, f"{name}, exported by zero-lab")
    folder = Path(asked.out) if asked.out else Path(asked.output) / EXPORTED / f"{name}-{to}"
    _write(folder, made.files)
    screen = Screen(make_console(on_stderr=asked.json))
    if asked.json:
        files = {file: str((folder / file).absolute()) for file in made.files}
        print(json.dumps({"point": name, "to": to, "files": files, "use": made.use, "notes": made.notes}))
    for note in made.notes:
        screen.say(f"note: {note}")
    rows = [Row("file", shown((folder / file).absolute())) for file in made.files]
    comes_back = OURS in made.files.get(JSON_FILE, "")
    back = [Row("back", f"{program()} import {shown((folder / JSON_FILE).absolute())}")] if comes_back else []
    screen.closing([*rows, Row("use", made.use), *back])
    return OK


def parser() -> VerbParser:
    parser = verb_parser("export", "A point as the files with which its engine, or another one, runs it.")
    stacks = ",".join(WRITERS)
    parser.usage = f"{program()} export [-h] [RUN] [group=option ...] [--to {{{stacks}}}] [--out FOLDER] [--json]"
    parser.epilog = f"example: {program()} export zero=stage3 precision=bf16 --to deepspeed"
    parser.add_argument("run", metavar="RUN", nargs="?", help="a point's label, a run's folder or an experiment file")
    parser.add_argument("--to", choices=tuple(WRITERS), help="default: the engine of the point")
    parser.add_argument("--out", metavar="FOLDER", help="default: OUTPUT/exported/POINT-STACK")
    parser.add_argument("--sweep", default="last", help="the sweep of a label; default: last")
    add_output(parser)
    add_json(parser)
    return parser


def _own_stack(name: str, config: RunConfig) -> str:
    """The stack of the point's engine. Refusal: its engine needs no files."""
    kind = str(config.engine.kind)
    if kind in WRITERS:
        return kind
    what = "zero-lab's own runtime" if config.engine.is_own else "plain PyTorch in one process"
    fix = "   or   ".join(f"--to {name}" for name in wings.ENGINES if name in WRITERS)
    raise Refusal([f"{name}: engine={kind} is {what}, for which no file is needed      fix: {fix}"])


def _point(words: Sequence[str], output: str, sweep: str) -> tuple[str, RunConfig]:
    """A name and the resolved configuration of what the words name."""
    if not words:
        raise Refusal(
            [f"expected RUN: a point's label, a run's folder, an experiment file or settings; see {program()} list"]
        )
    first, settings = Path(words[0]), words[1:]
    if not first.exists() and ("=" in words[0] or words[0].startswith("-")):
        point = _composed(words)
        return point.label, point.config
    if wrong := [word for word in settings if "=" not in word]:
        raise Refusal([f"expected one RUN, and settings that change it, found {' '.join(wrong)}"])
    if first.suffix in (".yaml", ".yml") and first.is_file():
        found = _composed(["--config-dir", str(first.absolute().parents[1]), f"experiment={first.stem}", *settings])
        return first.stem, found.config
    name, config = _recorded(first) if first.is_dir() else _labelled(words[0], output, sweep)
    return name, _changed(config, settings) if settings else config


def _changed(config: RunConfig, settings: Sequence[str]) -> RunConfig:
    """The configuration with other settings. A group that is chosen anew loses the keys of its old option."""
    typed = dict(word.split("=", 1) for word in settings)
    kept = {key: value for key, value in words_of_point(config).items() if key.lstrip("+").split(".")[0] not in typed}
    return _composed([f"{key}={value}" for key, value in {**kept, **typed}.items()]).config


def _composed(words: Sequence[str]) -> Point:
    points, problems = judged(composed(arguments.split([*words])), here())
    if problems or len(points) != 1 or not isinstance(points[0], Point):
        raise Refusal(problems or [f"expected one point, found {len(points)}; give one value for each setting"])
    return points[0]


def _recorded(folder: Path) -> tuple[str, RunConfig]:
    """The point of an attempt's folder, or of the newest attempt in a point's folder."""
    attempts = sorted((one for one in (folder / "attempts").glob("*/config.json")), key=lambda path: path.parent.name)
    file = next((path for path in (*reversed(attempts), folder / "config.json") if path.is_file()), None)
    if file is None:
        raise Refusal([f"{folder}: expected a run's folder, with a config.json; see {program()} status"])
    return folder.resolve().name, _read(file)


def _read(file: Path) -> RunConfig:
    """The configuration of an attempt, whose epochs are the steps that they were with its data."""
    try:
        config = from_dict(require_json(file))
    except (ConfigError, TypeError) as error:
        raise Refusal([f"{file}: {one}" for one in str(error).splitlines()]) from None
    result = AttemptPaths(file.parent).result
    if config.steps() is None and result.is_file():
        steps = config.steps(require_json(result)["data"]["train_samples"])
        config = replace(config, train=replace(config.train, max_steps=steps, epochs=None))
    return config


def _labelled(label: str, output: str, sweep: str) -> tuple[str, RunConfig]:
    found = verbs.find_point(sweep_record.standings(named_sweep.find_sweep(output, sweep)), label)
    if found.attempt is not None:
        return found.label, _read(found.attempt.config)
    return found.label, _composed(list(found.planned.overrides)).config


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"


def _deepspeed(config: RunConfig, why: str) -> Exported:
    if config.engine.kind is EngineKind.deepspeed:
        return deepspeed_loop.exported(config, why)
    refuse(deepspeed_export.problems_of(config))
    content = deepspeed_export.deepspeed_config(config)
    files = {JSON_FILE: _json(content), LINES_FILE: deepspeed_loop.parts_file(config, content, why)}
    use = f"deepspeed --num_gpus {config.resources.ranks} train.py, with deepspeed.initialize as {LINES_FILE} shows it"
    return Exported(files, deepspeed_export.notes_of(config), use)


WRITERS: dict[str, Callable[[RunConfig, str], Exported]] = {
    "deepspeed": _deepspeed,
    "fsdp2": fsdp2_export.exported,
    "ddp": ddp_export.exported,
}


def _write(folder: Path, files: dict[str, str]) -> None:
    """Writes the files. Refusal if one is there with another content, which may be the user's work."""
    taken = [name for name, text in files.items() if (folder / name).exists() and not _is(folder / name, text)]
    if taken:
        raise Refusal([f"{folder / name} is there, with another content      fix: --out FOLDER" for name in taken])
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")


def _is(path: Path, text: str) -> bool:
    return path.is_file() and path.read_bytes() == text.encode()
