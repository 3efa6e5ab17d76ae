"""Turns what a file or a command line says into words of conf/, and reports what became of each key."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.config.strict import Refusal
from orchestrator.text.units import many
from orchestrator.wings.foreign import dropin_words, training_arguments
from orchestrator.wings.foreign.findings import Fate, Foreign, KeyFinding, as_word
from orchestrator.wings.foreign.meanings import UNSAID, settings_of
from orchestrator.wings.foreign.silently import silent_effects
from orchestrator.wings.foreign.training_arguments import TypedArguments
from zero_runtime.deepspeed.auto import AutoValue, AutoValues, auto_values, leaves, mismatches, with_values
from zero_runtime.deepspeed.config import DropinConfig, examine
from zero_runtime.deepspeed.keys import HOMES
from zero_runtime.deepspeed.parallel_section import SEQUENCE, batch_ranks
from zero_runtime.deepspeed.schema import AUTO, Reader
from zero_runtime.deepspeed.zero_section import AHEAD

OURS = "_zero_lab"  # the section of an exported file with the words that DeepSpeed has no keys for
DEFAULT = "by default"
_SECTIONS = {"fp16": "fp16", "bf16": "bf16", "bfloat16": "bf16"}  # of a 16-bit dtype, by name and older name
# Keys of the form in which settings of FSDP are read too.
OF_DEEPSPEED = ("zero_optimization.stage", "communication_data_type", "bf16.enabled", "fp16.enabled")
_LENGTHS = ("scheduler.params.warmup_num_steps", "scheduler.params.total_num_steps")  # known if the steps are


@dataclass(frozen=True)
class Imported:
    """The words that run the point, what became of each key, and sentences for the user. native: settings that only
    points of engine=deepspeed read."""

    source: str
    words: dict[str, str]
    native: tuple[str, ...]
    keys: tuple[KeyFinding, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    silent: tuple[str, ...]
    ranks: int


@dataclass(frozen=True)
class Line:
    """What is known beside the source: the arguments of --args (None without any), settings that the user types, the
    number of ranks of this machine, and the hidden size of the model that the settings name."""

    args: TypedArguments | None
    settings: Mapping[str, str]
    ranks_here: int
    hidden_size: int | None


def imported(found: Foreign, line: Line) -> Imported:
    """The point that a source describes. Refusal lists every key that is unknown, contradictory or unsupported."""
    ranks, from_where = _ranks(found, line)
    config, own = _without_ours(found.config, found.problems)
    values, args = _auto(found, line), line.args
    counted = batch_ranks(config, ranks)
    filled = auto_values(config, values, counted)
    known = _reduced_as_sequences(with_values(config, filled))
    said = 0 if args is None else len(args.problems)
    if args is not None:
        found.problems += args.problems
        differing = mismatches(config, values, counted, args.given) if found.must_match else []
        found.problems += [f'{one}: the Trainer refuses this; write "auto"' for one in differing]
    if found.problems and not config:
        raise Refusal(found.problems)
    reader = Reader(HOMES)
    read = examine(known, ranks, "cpu", reader)
    found.problems += [_with_consequence(problem, args) for problem in reader.problems]
    found.problems += [] if reader.problems else dropin_words.inexpressible(read)
    notes = [*found.notes, *(note for note in read.notes if not note.startswith(("auto:", "gradient_clipping")))]
    script = _script_words(read, args, notes, found.problems)
    found.problems += [] if args is None else args.problems[said:]
    if found.problems:
        raise Refusal(found.problems)
    words = {**dropin_words.words_of(read), **found.words, **script}
    words |= own
    words["resources.ranks"] = str(ranks)
    if args is not None and args.nodes > 1:
        words["resources.nodes"] = str(args.nodes)
    keys = [*found.keys, *([] if args is None else args.keys), *_findings(config, filled, reader, words, args)]
    keys += [] if args is None else training_arguments.rows(args, {one.source for one in filled.values()})
    keys = [one._replace(words=_with_values(one.words, words)) for one in keys]
    notes += [] if args is None else args.notes
    notes.append(f"{many(ranks, 'rank')}: {from_where}")
    silent = silent_effects(known) if found.engine == "DeepSpeed" else []
    if found.engine != "DeepSpeed":  # keys in whose form its settings were read are not in the file
        keys = [one for one in keys if one.key not in OF_DEEPSPEED]
    native = _native(known, reader) if found.engine == "DeepSpeed" else ()
    warnings = _unanswered(filled, line, words)
    return Imported(found.source, words, native, tuple(keys), tuple(notes), warnings, tuple(silent), ranks)


def _native(known: Mapping[str, Any], reader: Reader) -> tuple[str, ...]:
    """The keys of zero_optimization that have no effect here, as settings of DeepSpeed's own rows: buckets, overlap and
    the like. Without its sections, of which the group offload makes those that are needed."""
    section = known.get("zero_optimization")
    keys = section if isinstance(section, Mapping) else {}  # true in old files
    named = {f"zero_optimization.{key}": value for key, value in keys.items()}
    own = {*reader.idle, *AHEAD}
    tuned = {path: value for path, value in named.items() if path in own and value not in (None, AUTO)}
    return tuple(f"engine.deepspeed.{path}={as_word(value)}" for path, value in tuned.items())


def _unanswered(filled: Mapping[str, AutoValue], line: Line, words: Mapping[str, str]) -> tuple[str, ...]:
    """That a precision is off because nothing answers its "auto"."""
    asked = [path for path in filled if path.endswith(".enabled") and path.partition(".")[0] in _SECTIONS]
    if not asked or line.args is not None or "precision" in line.settings or words["precision"] != "fp32":
        return ()
    name = _SECTIONS[asked[0].partition(".")[0]]
    fix = f"--args='--{name} ...', the arguments of your script   or   precision={name}"
    return (f'{" and ".join(asked)} "auto" is off without the script\'s arguments: trains in fp32      fix: {fix}',)


def _with_values(names: Sequence[str], words: Mapping[str, str]) -> tuple[str, ...]:
    """The settings, those that are named alone with the values that they have in `words`; without what has none."""
    return tuple(one if "=" in one else f"{one}={words[one]}" for one in names if "=" in one or one in words)


def _ranks(found: Foreign, line: Line) -> tuple[int, str]:
    typed = _whole(line.settings.get("resources.ranks", ""))
    if typed is not None:
        return typed, "given"
    if found.ranks is not None:
        return found.ranks, f"num_processes of {found.source}"
    if line.args is not None and line.args.ranks is not None:
        return line.args.ranks, "the launcher of --args"
    return line.ranks_here, "as many as this machine has by default; resources.ranks=N changes it"


def _without_ours(config: Mapping[str, Any], problems: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The configuration without the section of an export, and the words in that section."""
    left = copy.deepcopy(dict(config))
    section = left.pop(OURS, {})
    words = section.get("words", []) if isinstance(section, Mapping) else None
    if not isinstance(words, list) or not all(isinstance(word, str) and "=" in word for word in words):
        problems.append(f"{OURS}: expected words as `export` writes them, found {section!r}; remove the section")
        return left, {}
    return left, dict(word.split("=", 1) for word in words)


def _reduced_as_sequences(config: dict[str, Any]) -> dict[str, Any]:
    """With sequence parallelism DeepSpeed reduces gradients in a dtype of its own, which is fp32 unless it is given."""
    if (config.get(SEQUENCE) or 1) == 1:
        return config
    return {**config, "communication_data_type": config.get("seq_parallel_communication_data_type", "fp32")}


def _auto(found: Foreign, line: Line) -> AutoValues:
    """What "auto" is filled in from: the arguments or their defaults, and batch sizes that the user types."""
    values = (line.args or TypedArguments()).auto(line.hidden_size)
    given = {} if line.args is None else line.args.given
    if "per_device_train_batch_size" not in given:
        micro = _whole(line.settings.get("batch.micro", ""))
        values = values if micro is None else replace(values, per_device_train_batch_size=micro)
    if "gradient_accumulation_steps" not in given:
        steps = _whole(line.settings.get("batch.accumulation", ""))
        values = values if steps is None else replace(values, gradient_accumulation_steps=steps)
    return values


def _whole(text: str) -> int | None:
    return int(text) if text.isdigit() and int(text) else None


def _script_words(
    read: DropinConfig, args: TypedArguments | None, notes: list[str], problems: list[str]
) -> dict[str, str]:
    """The words that the script's arguments say, beside the configuration; notes if there are none."""
    words: dict[str, str] = {}
    if args is not None:
        if read.optimizer is None:
            words |= training_arguments.optimizer_words(args, problems)
        if read.schedule is None:
            words |= training_arguments.schedule_words(args, notes, problems)
        for name, section in (("optim", read.optimizer), ("lr_scheduler_type", read.schedule)):
            if section is not None and name in args.given:
                notes.append(
                    f"{name}={args.given[name]} is not used, here as in the Trainer: the file has a section for it"
                )
        return words | training_arguments.other_words(args)
    if read.optimizer is None:
        notes.append("no optimizer is named, so the script makes it: its values are those of conf/; give --args")
    if read.schedule is None:
        what = "the rate is constant" if read.optimizer is not None else "the schedule is that of conf/"
        notes.append(f"no scheduler is named: {what}, unless the script makes one")
    return words


def _with_consequence(problem: str, args: TypedArguments | None) -> str:
    """A problem, with what DeepSpeed does about an unknown key, and with what a length that is "auto" lacks."""
    path, _, told = problem.partition(": ")
    if args is not None and path in _LENGTHS and told.startswith('"auto"'):
        names = ("warmup_ratio", "warmup_steps") if path == _LENGTHS[0] else ()
        share = next((f"{name}={args.given[name]:g}" for name in names if args.given.get(name)), '"auto"')
        return f"{path}: {share} needs the number of steps      fix: --args='--max_steps N'"
    if not told.startswith("unknown key"):
        return problem
    inside = path.partition(".")[0] in ("zero_optimization", "fp16", "bf16", "tensor_parallel")
    what = "DeepSpeed refuses it too" if "." in path and inside else "DeepSpeed ignores it in silence"
    return f"{problem}      ({what})"


def _findings(
    config: Mapping[str, Any],
    filled: Mapping[str, AutoValue],
    reader: Reader,
    words: Mapping[str, str],
    args: TypedArguments | None,
) -> list[KeyFinding]:
    found = []
    for path, value in leaves(config):
        text = _shown(value)
        here = tuple(f"{key}={words[key]}" for key in settings_of(path) if key in words)
        section = path.partition(".")[0]
        if any(path == one or path.startswith(f"{one}.") for one in reader.idle):
            found.append(
                KeyFinding(path, f"auto = {_shown(filled[path].value)}" if path in filled else text, Fate.idle)
            )
        elif section in _SECTIONS and words["precision"].partition("_")[0] != _SECTIONS[section]:
            off = f"auto = {_shown(filled[path].value)}" if path in filled else text
            found.append(KeyFinding(path, off, Fate.mapped, (), f"{section} is off"))
        elif path in filled:
            text = f"auto = {_shown(filled[path].value)}"
            found.append(KeyFinding(path, text, Fate.filled, here, _source(path, filled[path], args)))
        elif any(path == one.partition(":")[0] or path.startswith(f"{one}.") for one in reader.older):
            found.append(KeyFinding(path, text, Fate.older, here, _newer(path, reader)))
        else:
            found.append(KeyFinding(path, text, Fate.mapped, here, "" if here else UNSAID.get(path, "")))
    return found


def _source(path: str, one: AutoValue, args: TypedArguments | None) -> str:
    names = one.source.split(", ")
    given = {} if args is None else args.given
    if path == "train_batch_size" or one.source == "always" or "hidden_size" in one.source:
        return one.source
    if named := [name for name in names if name in given]:
        return f"--{named[0]}"
    return f"{one.source} {DEFAULT}"


def _newer(path: str, reader: Reader) -> str:
    new = next(new for old, new in reader.older.items() if path == old.partition(":")[0] or path.startswith(f"{old}."))
    return f"an older name of {new}"


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
