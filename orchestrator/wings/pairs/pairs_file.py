"""Reads the prompts and responses of a JSON file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

MESSAGES = "messages"
# The keys of the prompt and of the response of a record.
PAIR_KEYS = (("prompt", "response"), ("prompt", "completion"), ("instruction", "output"), ("question", "answer"))
FORMS = f"{', '.join('/'.join(keys) for keys in PAIR_KEYS)} or {MESSAGES}"


class Pair(NamedTuple):
    """The turns of a conversation before the response, each with its `role` and `content`; and the response."""

    turns: tuple[Mapping[str, str], ...]
    response: str

    @property
    def prompt(self) -> str:
        """The turns as plain text, for a tokenizer without a chat template."""
        return "\n".join(turn["content"] for turn in self.turns)


def read_pairs(path: Path) -> list[Pair]:
    """The pairs of a file: a JSON array of objects, or an object in each line. ValueError if one is no pair.

    An object has keys of PAIR_KEYS (an `instruction` may have an `input`), or `messages`, of which the last is the
    response.
    """
    found = list(_pairs(path))
    if not found:
        raise ValueError(f"data.path: expected prompts and responses, found none in {path}; name another file")
    return found


def _pairs(path: Path) -> Iterator[Pair]:
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"data.path: expected JSON in UTF-8, found other bytes in {path}: {error.reason}") from None
    if text.lstrip()[:1] == "[":
        for number, record in enumerate(_parsed(str(path), text), start=1):
            yield _pair(f"{path}, record {number}", record)
        return
    # A text may hold other characters at which splitlines would divide it.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            place = f"{path}, line {number}"
            yield _pair(place, _parsed(place, line))


def _parsed(place: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{place}: expected a JSON array of objects, or an object in each line, found another text ({why})"
        ) from None


def _pair(place: str, record: Any) -> Pair:
    if not isinstance(record, dict):
        raise ValueError(f"{place}: expected an object with {FORMS}, found {type(record).__name__}")
    answers = [key for key in (*(answer for _, answer in PAIR_KEYS), MESSAGES) if record.get(key) is not None]
    if len(answers) > 1:
        raise ValueError(f"{place}: expected one response, found {' and '.join(answers)}; remove all but one of them")
    if MESSAGES in answers:
        return _conversation(place, record[MESSAGES])
    keys = next((keys for keys in PAIR_KEYS if keys[0] in record and keys[1] in answers), None)
    if keys is None:
        raise ValueError(f"{place}: expected an object with {FORMS}, found the keys {', '.join(record) or 'none'}")
    prompt, response = (_text(place, key, record[key]) for key in keys)
    if not prompt:
        raise ValueError(f"{place}: expected a text as its {keys[0]}, found an empty one")
    more = _text(place, "input", record.get("input") or "") if keys[0] == "instruction" else ""
    return Pair(({"role": "user", "content": f"{prompt}\n{more}" if more else prompt},), response)


def _conversation(place: str, turns: Any) -> Pair:
    are_turns = isinstance(turns, list) and all(isinstance(one, dict) for one in turns)
    if not are_turns or len(turns) < 2 or turns[-1].get("role") != "assistant":
        raise ValueError(f"{place}: expected messages of which the last is the assistant's, found none")
    plain = [{key: _text(place, key, one.get(key)) for key in ("role", "content")} for one in turns]
    return Pair(tuple(plain[:-1]), plain[-1]["content"])


def _text(place: str, key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{place}: expected a text as its {key}, found {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = ascii(value[error.start])[1:-1]
        raise ValueError(f"{place}: expected a text as its {key}, found half a character ({half})") from None
    return value
