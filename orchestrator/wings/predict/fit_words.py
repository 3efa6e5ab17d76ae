"""Words of `fit` and `choose` that a run does not have: the file of a model, machines by short names, and a job."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import NamedTuple

import yaml

from orchestrator.compose import arguments
from orchestrator.compose.folders import config_folders, option_file
from orchestrator.compose.settable import read_tree
from orchestrator.config.pretrained import CONFIG
from orchestrator.config.schema import DataKind, RunConfig, Tokenizer, to_dict
from orchestrator.config.strict import Refusal
from orchestrator.text.paths import expanded
from orchestrator.text.units import count
from orchestrator.wings.profile import costs
from orchestrator.workloads.data import load_data

HARDWARE, GPUS = "hardware", "hardware.gpus"
RANKS, NODES = "resources.ranks", "resources.nodes"
TOKENS, EPOCHS = "train.tokens", "train.epochs"
COUNTED = re.compile(r"(?:([1-9][0-9]*)x)?(\w+)")  # 8xh100, a100_80gb


class Machine(NamedTuple):
    """One machine of the line: its name as typed, empty if the line names at most one, and all words for it."""

    name: str
    words: list[str]


class Length(NamedTuple):
    """How much is to be trained: tokens, or epochs of the configured data."""

    tokens: float | None = None
    epochs: float | None = None

    def tokens_of(self, config: RunConfig) -> float:
        """Refusal if the tokens of the data are not counted without a tokenizer."""
        if self.tokens is not None:
            return self.tokens
        assert self.epochs is not None, "a job has tokens or epochs"
        return self.epochs * tokens_of_an_epoch(config)


def tokens_of_an_epoch(config: RunConfig) -> int:
    """Tokens of the training part of the data, whose tokens are bytes. Refusal if they are made by a tokenizer."""
    data = config.data
    if data.kind is DataKind.pairs or data.tokenizer is not Tokenizer.bytes:
        fix = f"{TOKENS}=50e6"
        raise Refusal([f"{EPOCHS}: expected data whose tokens are bytes, found a tokenizer's      fix: {fix}"])
    found = load_data(
        str(data.kind),
        data.path,
        seq=config.batch.seq,
        seed=config.seed,
        vocab_size=int(config.model.config["vocab_size"]),
        validation_fraction=data.validation_fraction,
    )
    return found.train_samples * config.batch.seq


def with_folder(word: str) -> list[str]:
    """model=PATH as the settings of a local folder. The path may also be that of the folder's config.json."""
    key, _, value = word.partition("=")
    if key not in ("model", "model.path") or os.sep not in value:
        return [word]
    path = expanded(value)
    folder = path.parent if path.name == CONFIG and path.is_file() else path
    return [*(["model=pretrained"] if key == "model" else []), f"model.path={folder}"]


def values(words: Sequence[str]) -> dict[str, str]:
    """The last value of each group and key that the words set."""
    return dict(word.lstrip("+").partition("=")[::2] for word in words)


def job_of(words: Sequence[str]) -> tuple[Length | None, list[str]]:
    """The job that the words ask about, and the words without it. With measure=train epochs are a run's own."""
    given = values(words)
    found = {key: given[key] for key in (TOKENS, EPOCHS) if key in given}
    if len(found) > 1:
        raise Refusal([f"{TOKENS} and {EPOCHS} are two lengths of one training      fix: leave one of them out"])
    if not found:
        return None, list(words)
    ((key, text),) = found.items()
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        example = "50e6" if key == TOKENS else "3"
        raise Refusal([f"{key}: expected a number above 0, found '{text}'      fix: {key}={example}"])
    kept = (key,) if key == TOKENS or given.get("measure") != "train" else ()
    rest = [word for word in words if word.partition("=")[0] not in kept]
    return Length(number) if key == TOKENS else Length(epochs=number), rest


def machines(words: Sequence[str]) -> list[Machine]:
    """The line for each machine that its hardware=... names, one line if it names none.

    `8xh100` is 8 GPUs of h100_80gb: fewer than a node has are one node with as many, more are several nodes. A node of
    a preset with one GPU has as many as it needs for the ranks.
    """
    given = values(words)
    if HARDWARE not in given:
        return [Machine("", list(words))]
    names = given[HARDWARE].split(",")
    folder = arguments.split(words).flags.get("--config-dir")
    at = max(place for place, word in enumerate(words) if word.lstrip("+").partition("=")[0] == HARDWARE)
    return [
        Machine(name if len(names) > 1 else "", [*words[:at], *_named(name, given, folder), *words[at + 1 :]])
        for name in names
    ]


def _named(text: str, given: dict[str, str], folder: str | None) -> list[str]:
    """The words of one machine, with its GPUs and nodes."""
    match = COUNTED.fullmatch(text)
    if match is None:
        return [f"{HARDWARE}={text}"]
    options = read_tree(folder).groups[HARDWARE]
    number, name = (None, text) if text in options else (match[1], _preset(match, options))
    found = [f"{HARDWARE}={name}"]
    of_node = _gpus_of(name, folder)
    if of_node is None or GPUS in given:
        return found
    nodes = _whole(given.get(NODES, ""))
    wanted = int(number) if number is not None else -(-_whole(given.get(RANKS, "")) // (nodes or 1))
    if not wanted or wanted == of_node or (number is None and wanted < of_node):
        return found
    if wanted < of_node or of_node == 1:
        return [*found, f"{GPUS}={wanted}"]
    return found if nodes or wanted % of_node else [*found, f"{NODES}={wanted // of_node}"]


def _whole(text: str) -> int:
    """The number; 0 if it is none, which the rules of runs report."""
    return int(text) if text.isdigit() else 0


def _preset(match: re.Match[str], options: Sequence[str]) -> str:
    """The option that the name stands for. Refusal if there are several."""
    name = match[2]
    near = [name] if name in options else [option for option in options if option.startswith(f"{name}_")]
    if len(near) > 1:
        count_of = f"{match[1]}x" if match[1] else ""
        fixes = "   or   ".join(f"{HARDWARE}={count_of}{option}" for option in near)
        raise Refusal([f"hardware has no option '{name}', found {' and '.join(near)}      fix: {fixes}"])
    return near[0] if near else name


def _gpus_of(name: str, folder: str | None) -> int | None:
    """The GPUs of a node of a preset; None if it is this machine, or if the file is not there or does not say it."""
    file = option_file(f"{HARDWARE}/{name}", config_folders(folder))
    try:
        found = None if file is None else yaml.safe_load(file.read_text(encoding="utf-8")).get("gpus")
    except (OSError, yaml.YAMLError, AttributeError):
        return None  # composing the file reports its problem
    return found if isinstance(found, int) and found > 0 else None


def length_text(job: Length, config: RunConfig, ends: tuple[float, float] | None) -> str:
    """The hours of a job at the least and the most tokens per second, and what they cost where a price is set."""
    tokens = job.tokens_of(config)
    steps = -(-tokens // (config.batch.global_size * config.batch.seq))
    what = f"{count(tokens)} tokens are {steps:,.0f} steps"
    if ends is None:
        return f"{what}; hours are not known, because no speed is"
    hours = [tokens / end / 3600 for end in reversed(ends)]
    price = costs.price_of(to_dict(config))
    per_billion = [costs.predicted_cost(to_dict(config), end) for end in reversed(ends)]
    amounts = [one * tokens / costs.TOKENS for one in per_billion if one is not None]
    money = f", {_span(amounts)} {price.currency}".rstrip() if price is not None and amounts else ""
    return f"{what} and {_span(hours)} h{money}"


def _span(ends: Sequence[float]) -> str:
    """Both ends with two digits, as the speeds have; one number if they are shown alike."""
    return "-".join(dict.fromkeys(f"{float(f'{end:.2g}'):,g}" for end in ends))
