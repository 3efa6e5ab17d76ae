"""Reads the prompts and responses of a JSON file, and checks its beginning before anything is started."""

from __future__ import annotations

import codecs
import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

MESSAGES = "messages"
# The keys of the prompt and of the response of a record.
PAIR_KEYS = (("prompt", "response"), ("prompt", "completion"), ("instruction", "output"), ("question", "answer"))
FORMS = f"{', '.join('/'.join(keys) for keys in PAIR_KEYS)} or {MESSAGES}"
BEGINNING_BYTES = 1 << 20  # of a file, that `problem` reads


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
    found = list(_pairs(path, path.read_bytes(), is_whole=True))
    if not found:
        raise ValueError(f"data.path: expected prompts and responses, found none in {path}; name another file")
    return found


def problem(path: Path) -> str:
    """What is wrong with the first records of the file, up to BEGINNING_BYTES; empty if nothing is."""
    about = path.stat()
    return _problem(path, about.st_ino, about.st_size, about.st_mtime_ns)


@functools.lru_cache
def _problem(path: Path, _inode: int, size: int, _changed_ns: int) -> str:
    """Once for each content of a file, since a sweep asks for each of its points."""
    try:
        if size <= BEGINNING_BYTES:
            read_pairs(path)
            return ""
        with path.open("rb") as file:
            for _ in _pairs(path, file.read(BEGINNING_BYTES), is_whole=False):
                pass
    except (ValueError, OSError) as error:
        return str(error)
    return ""


def _pairs(path: Path, content: bytes, *, is_whole: bool) -> Iterator[Pair]:
    """The pairs of the content; of one that is not whole, those that are whole."""
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(content, final=is_whole)
    except UnicodeDecodeError as error:
        raise ValueError(f"data.path: expected JSON in UTF-8, found other bytes in {path}: {error.reason}") from None
    if text.lstrip()[:1] == "[":
        for number, record in enumerate(_parsed(str(path), text) if is_whole else _first(text), start=1):
            yield _pair(f"{path}, record {number}", record)
        return
    lines = text.split("\n")  # a text may hold other characters at which splitlines would divide it
    for number, line in enumerate(lines if is_whole else lines[:-1], start=1):
        if line.strip():
            place = f"{path}, line {number}"
            yield _pair(place, _parsed(place, line))


def _first(text: str) -> list[Any]:
    """The first record of the beginning of an array; none if it is longer than that."""
    try:
        return [json.JSONDecoder().raw_decode(text.partition("[")[2].lstrip())[0]]
    except (ValueError, RecursionError):
        return []


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
