"""`zlab generate model.path=FOLDER prompt=TEXT`: the likeliest text, from weights that are sharded over the ranks."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator.commands import rank_job
from orchestrator.commands.verb_parser import VerbParser, add_json, verb_parser
from orchestrator.config.schema import RunConfig
from orchestrator.config.strict import Refusal
from orchestrator.exit_codes import FAILED, OK
from orchestrator.report.screen import Screen, make_console
from orchestrator.report.summary import Row
from orchestrator.text.paths import program
from orchestrator.text.streams import complain
from orchestrator.text.units import many, size
from orchestrator.wings.kinds.kind import is_causal, kind_of
from orchestrator.wings.predict.calibrate import local_points
from orchestrator.wings.predict.fit import names

ENTRY = "orchestrator.wings.generate.generate_rank:run_rank"
NEW_TOKENS = 32
LIMIT_S = 24 * 3600.0  # a rank that hangs is found by the watch (resources.stuck_s)
# What the words of a line become if they do not say: an evaluation, whose rules are those of generation.
USUAL = {"measure": "eval", "zero": "stage3", "data": "synthetic"}


class GenerationLine(NamedTuple):
    """A line: the prompts in order, the most new tokens of each, the beams of its search, and the other words."""

    prompts: list[dict[str, Any]]
    new_tokens: int
    beams: int
    words: list[str]


def main(words: Sequence[str]) -> int:
    """Prints each prompt with its answer. Returns 0, or 1 if the ranks failed."""
    flags, rest = parser().parse_known_args(words)
    asked = read(rest)
    config = config_of(asked)
    screen = Screen(make_console(on_stderr=flags.json))
    try:
        found = rank_job.run(
            config,
            ENTRY,
            {"generation.json": {"prompts": asked.prompts, "new_tokens": asked.new_tokens, "beams": asked.beams}},
            partial(screen.say, style="dim"),
            lambda _events: None,
            limit_s=LIMIT_S,
        )
    except rank_job.RanksFailed as error:
        least = [f"{key}={n // 2}" for key, n in (("beams", asked.beams), ("new_tokens", asked.new_tokens)) if n > 1]
        fix = f"      fix: {'   or   '.join(least)}" if error.lacked_memory and least else ""
        complain(f"error: nothing was generated: {error}{fix}")
        return FAILED
    if flags.json:
        print(json.dumps(found, ensure_ascii=False))
        return OK
    for one in found["answers"]:
        print(_text(one))
    screen.closing([Row("done", _done(config, found)), Row("next", _next(config, asked))])
    return OK


def parser() -> VerbParser:
    parser = verb_parser(
        "generate",
        "Text of a causal language model, greedy or by a beam search. The weights are sharded over the ranks "
        "(zero=stage3) and may be offloaded; prompts are given to the ranks in turn.",
    )
    parser.usage = (
        f"{program()} generate [-h] model.path=FOLDER (prompt=TEXT | ask=TEXT | prompts=FILE | tokens=5,6,7) ... "
        f"[new_tokens={NEW_TOKENS}] [beams=1] [group=option | key=value ...] [--json]"
    )
    parser.epilog = (
        "prompt=TEXT is continued as it is, and prompts=FILE has one in each line. ask=TEXT is a question, written as "
        "data=pairs writes a prompt: by the tokenizer's chat template, if it has one. Without a tokenizer in the "
        "folder each byte is a token, and tokens= takes token ids."
    )
    add_json(parser)
    return parser


def read(words: Sequence[str]) -> GenerationLine:
    """Separates the words of this verb from settings. Refusal if there is no prompt, or one that cannot be read."""
    prompts: list[dict[str, Any]] = []
    new_tokens, beams, rest = NEW_TOKENS, 1, []
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in ("prompt", "prompts", "ask", "tokens", "new_tokens", "beams"):
            rest.append(word)
        elif key == "prompt":
            prompts.append({"text": value})
        elif key == "ask":
            prompts.append({"ask": value})
        elif key == "prompts":
            prompts += [{"text": line} for line in _lines(value)]
        elif key == "tokens":
            prompts.append(
                {"tokens": [_whole(one, "tokens", 0, "token ids: tokens=5,6,7") for one in value.split(",")]}
            )
        elif key == "beams":
            beams = _whole(value, key, 1, "a number of at least 1: beams=4")
        else:
            new_tokens = _whole(value, "new_tokens", 1, f"a number of at least 1: new_tokens={NEW_TOKENS}")
    if any("" in (one.get("text"), one.get("ask")) for one in prompts):
        raise Refusal(["prompt: expected a text, found an empty one      fix: prompt='Once upon a time'"])
    if not prompts:
        raise Refusal([f"generate: expected a prompt, found none      fix: {program()} generate ... prompt='Once'"])
    return GenerationLine(prompts, new_tokens, beams, rest)


def config_of(asked: GenerationLine) -> RunConfig:
    """The configuration of a line, resolved. Refusal if there are several, or if it cannot hold the prompts."""
    given = names(asked.words)
    model = ["model=pretrained"] if "model.path" in given and "model" not in given else []
    points = local_points([*model, *asked.words], USUAL, "generate")
    if len(points) > 1:
        raise Refusal([f"generate runs one configuration, found {len(points)}      fix: one value for each setting"])
    _check_length(points[0].config, asked)
    return points[0].config


def _lines(name: str) -> list[str]:
    try:
        lines = [line for line in Path(name).expanduser().read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise Refusal([f"prompts={name}: expected a text file with a prompt in each line, found none: {why}"]) from None
    if not lines:
        raise Refusal([f"prompts={name}: expected a prompt in each line, found an empty file"])
    return lines


def _whole(text: str, key: str, least: int, wanted: str) -> int:
    if not text.strip().isdecimal() or int(text) < least:
        raise Refusal([f"{key}: expected {wanted}, found {text!r}"])
    return int(text)


def _check_length(config: RunConfig, asked: GenerationLine) -> None:
    """Token ids must be in the vocabulary, and sequences within the positions of the model, which continues texts."""
    if not is_causal(config.model):
        kind = kind_of(config.model.model_type, config.model.config)
        raise Refusal([f"generate continues texts with a causal language model, found one of the kind {kind}"])
    vocabulary = int(config.model.config.get("vocab_size", 0))
    most = next(
        (
            config.model.config[key]
            for key in ("max_position_embeddings", "n_positions")
            if isinstance(config.model.config.get(key), int)
        ),
        None,
    )
    for one in asked.prompts:
        ids = one.get("tokens", ())
        if ids and max(ids) >= vocabulary:
            raise Refusal([f"tokens: expected ids below the vocabulary of {vocabulary}, found {max(ids)}"])
        if most is not None and len(ids) + asked.new_tokens > most:
            raise Refusal(
                [
                    f"new_tokens: expected at most the model's {most} positions with the prompt, found {len(ids)} and "
                    f"{asked.new_tokens} new ones      fix: new_tokens={max(most - len(ids), 1)}"
                ]
            )


def _text(one: dict[str, Any]) -> str:
    prompt = one.get("text", one.get("ask", one.get("tokens")))
    answer = one["new"] if one["answer"] is None else one["answer"]
    return f"rank {one['rank']}  {prompt!r}\n     ->  {answer!r}"


def _done(config: RunConfig, found: dict[str, Any]) -> str:
    tokens = sum(len(one["new"]) for one in found["answers"])
    memory = found["memory"]
    return (
        f"{many(len(found['answers']), 'prompt')}, {many(tokens, 'token')} in {found['seconds']:.1f} s on "
        f"{many(config.resources.ranks, 'rank')}; {size(memory['params'])} of weights a rank"
    )


def _next(config: RunConfig, asked: GenerationLine) -> str:
    words, text = ["measure=eval"], "held-out text"
    if any("ask" in one for one in asked.prompts):  # it continues no texts such as those of data=stdlib
        words, text = [*words, "data=pairs", "data.path=FILE"], "the held-out conversations of FILE"
    model = ["model=pretrained"] if config.model.path is not None else []
    kept = [word for word in asked.words if not word.startswith(("measure", "data"))]
    stage = [] if "zero" in names(kept) else ["zero=stage3"]
    return f"{program()} {shlex.join([*model, *kept, *stage, *words])}      # the loss on {text}"
