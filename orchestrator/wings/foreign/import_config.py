"""`zlab import FILE`: a configuration of DeepSpeed, Accelerate or the Trainer as an experiment file that runs here."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from orchestrator.commands.experiment_file import write_experiment
from orchestrator.commands.verb_parser import VerbParser, add_json, verb_parser
from orchestrator.compose import arguments, folders
from orchestrator.compose.line import composed
from orchestrator.config.schema import Resources
from orchestrator.config.strict import Refusal
from orchestrator.exit_codes import OK
from orchestrator.planning.points import judged
from orchestrator.planning.rules.scene import Scene, here
from orchestrator.report.screen import Screen, make_console
from orchestrator.report.summary import Row, Table
from orchestrator.text.paths import DEFAULT_OUTPUT, expanded, program, shown
from orchestrator.text.streams import complain
from orchestrator.wings.foreign.findings import Fate, KeyFinding
from orchestrator.wings.foreign.importing import DEFAULT, Imported, Line, imported
from orchestrator.wings.foreign.sources import source_of
from orchestrator.wings.foreign.training_arguments import TypedArguments
from orchestrator.wings.words import names
from orchestrator.wings.words.suggestions import NOT_HERE, OFF
from zero_runtime.deepspeed.auto import hidden_size_of
from zero_runtime.deepspeed.keys import TOP
from zero_runtime.deepspeed.schema import without_effect
from zero_runtime.errors import PlanError

FOLDER = "imported"
VALUE_SHOWN = 34
ENGINES = "zero,deepspeed,fsdp2"  # that the proposed sweep compares


def main(argv: Sequence[str]) -> int:
    """Prints what became of each key and writes the experiment file. Refusal: the file or the words are wrong."""
    asked, words = parser().parse_known_args(argv)
    path, words = _path(asked.file, words)
    settings = _settings(names.spelled(words, None))
    if settings.get("model.path", "null") != "null":  # the file is used from other folders too
        settings["model.path"] = str(expanded(settings["model.path"]).absolute())
    if path is None and asked.args is None:
        raise Refusal([f"expected FILE or --args      example: {program()} import ds_config.json"])
    try:
        found, args = source_of(path, asked.args)
    except PlanError as error:
        raise Refusal(str(error).splitlines()) from None
    scene = here()
    result = imported(found, Line(args, settings, _ranks_here(scene), _hidden_size(settings, args)))
    merged = {**result.words, **settings}
    typed = [f"{key}={value}" for key, value in sorted(merged.items(), key=lambda item: "." in item[0])]
    problems = _problems_here(typed, scene)
    folder = Path(settings.get("output", DEFAULT_OUTPUT)).absolute() / FOLDER
    name = write_experiment(folder, typed, f"imported from {found.source}", prefix=FOLDER)
    _show(result, typed, problems, folder, name, as_json=asked.json)
    return OK


def parser() -> VerbParser:
    parser = verb_parser(
        "import",
        "Reads a file of DeepSpeed, Accelerate or TrainingArguments, or a command line; says what "
        'became of each key, what "auto" stands for and what DeepSpeed does in silence; writes the point as an '
        "experiment file.",
    )
    parser.usage = f"{program()} import [-h] [FILE] [--args LINE] [group=option | key=value ...] [--json]"
    parser.epilog = f"example: {program()} import ds_config.json --args '--per_device_train_batch_size 4 --bf16'"
    parser.add_argument(
        "file", metavar="FILE", nargs="?", help="ds_config.json, Accelerate's YAML, or TrainingArguments in a file"
    )
    parser.add_argument("--args", metavar="LINE", help="TrainingArguments, or the whole command of the script")
    add_json(parser)
    return parser


def _path(file: str | None, words: list[str]) -> tuple[Path | None, list[str]]:
    """The file, and the settings; a setting may stand where the file is expected."""
    if file is not None and "=" in file and not Path(file).exists():
        return None, [file, *words]
    return (None if file is None else Path(file)), words


def _settings(words: Sequence[str]) -> dict[str, str]:
    """The typed settings by key. Refusal names words that are none."""
    wrong = dict.fromkeys(word for word in words if word.startswith("-") or "=" not in word)
    if wrong:
        raise Refusal(
            [f"{word}: expected a setting, such as batch.seq=512      see: {program()} import --help" for word in wrong]
        )
    return dict(word.split("=", 1) for word in words)


def _ranks_here(scene: Scene) -> int:
    return scene.ranks(Resources())


def _hidden_size(settings: Mapping[str, str], args: TypedArguments | None) -> int | None:
    """The hidden size of the model that is named, without loading it; None if none is named."""
    folder = settings.get("model.path") or (None if args is None else args.given.get("model_name_or_path"))
    size = settings.get("model.config.hidden_size")
    if size is not None and size.isdigit():
        return int(size)
    try:
        if folder is not None:
            return hidden_size_of(json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")))
        if "model" in settings:
            file = folders.option_file(f"model/{settings['model']}", folders.config_folders(None))
            return None if file is None else hidden_size_of(yaml.safe_load(file.read_text(encoding="utf-8"))["config"])
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError, RecursionError):
        return None  # what is wrong with the model is reported when the point is composed
    return None


def _problems_here(words: Sequence[str], scene: Scene) -> list[str]:
    """What keeps the point from running on this machine. Refusal: the words are no point anywhere."""
    _, problems = judged(composed(arguments.split([*words])), scene)
    return problems


def _show(
    result: Imported, words: Sequence[str], problems: Sequence[str], folder: Path, name: str, *, as_json: bool
) -> None:
    chosen = shlex.join(["--config-dir", shown(folder), f"experiment={name}"])
    line = f"{program()} {chosen}"
    sweep = f"{line} -m engine={ENGINES} measure=standard {shlex.join(result.native)}".rstrip()
    if as_json:
        document = {
            "source": result.source,
            "config_dir": str(folder),
            "experiment": name,
            "words": list(words),
            "ranks": result.ranks,
            "keys": [one._asdict() | {"fate": one.fate.value} for one in result.keys],
            "native": list(result.native),
            "notes": list(result.notes),
            "warnings": list(result.warnings),
            "silently": list(result.silent),
            "problems_here": list(problems),
        }
        print(json.dumps(document, ensure_ascii=False))
    screen = Screen(make_console(on_stderr=as_json))
    acting = [one for one in result.keys if one.fate is not Fate.idle]
    idle_keys = [one for one in result.keys if one.fate is Fate.idle]
    cells = tuple(_cells(one, screen.console.width // 3) for one in acting)
    screen.table(Table(("key", "value", "here", "because"), cells, names=4, drops=("because",)))
    for text in without_effect({one.key: _idle(one) for one in idle_keys}, TOP):
        screen.say(text)
    if result.native:
        screen.say("of these, engine=deepspeed has those of zero_optimization in the line `engines`")
    if any(one.note.endswith(DEFAULT) for one in acting):
        screen.say(f"{DEFAULT}: the default of TrainingArguments; --args gives the arguments of your script")
    for note in result.notes:
        screen.say(f"note: {note}")
    if result.silent:
        screen.say("\n  - ".join(["DeepSpeed also does this, without saying so in the file:", *result.silent]))
    for warning in (*result.warnings, *(f"not on this machine: {problem}" for problem in problems)):
        complain(f"warning: {warning}")
    file = shown(folder / "experiment" / f"{name}.yaml")
    rows = [Row("next", line), Row("engines", sweep)]
    if problems:  # no line of this machine runs it
        rows = [Row("next", f"{program()} fit {chosen} hardware=NAME")]
    screen.closing([Row("file", file), *rows])


def _idle(one: KeyFinding) -> str:
    """A key without effect, with the value that it would have, or with what there is for it."""
    why = one.value if one.value.startswith("auto =") else NOT_HERE.get(one.key.lstrip("-"), "")
    return f"{one.key} ({why})" if why and one.value.lower() not in OFF else one.key


def _cells(one: KeyFinding, width: int) -> tuple[str, str, str, str]:
    """The cells of a row. A key of more than `width` characters is divided at its last dot."""
    value = one.value if len(one.value) <= VALUE_SHOWN else f"{one.value[: VALUE_SHOWN - 3]}..."
    because = one.note if one.note else ("" if one.words else "as it is here")
    key = one.key if len(one.key) <= width else ".\n  ".join(one.key.rsplit(".", 1))
    return (key, value, " ".join(one.words), because)
