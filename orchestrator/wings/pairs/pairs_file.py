"""Reads the prompts and responses of JSON files, also of compressed ones, and of tables. Imports no torch: the command
line checks the first record with it."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from orchestrator.wings.pairs import tables
from orchestrator.workloads.text_files import TABLES, text_files

MESSAGES, CONVERSATIONS = "messages", "conversations"
# The roles of ShareGPT's `from`.
ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model"), "assistant"),
    "system": "system",
}
# The keys of the prompt and of the response of a record.
PAIR_KEYS = (("prompt", "response"), ("prompt", "completion"), ("instruction", "output"), ("question", "answer"))
FORMS = f"{', '.join('/'.join(keys) for keys in PAIR_KEYS)}, {MESSAGES} or {CONVERSATIONS}"


# All columns of a table that are read.
COLUMNS = (*dict.fromkeys(key for keys in PAIR_KEYS for key in keys), "input", MESSAGES, CONVERSATIONS, "system")
PLACE = re.compile(r"(?:rank \d+: )?(?:\w+Error: )?(\S.*, (?:line|record|row) \d+): expected ")
JSON_FILES = (".json", ".jsonl", ".json.gz", ".jsonl.gz")


class Pair(NamedTuple):
    """The turns of a conversation before its last response, each with its `role` and `content`; and that response."""

    turns: tuple[Mapping[str, str], ...]
    response: str

    @property
    def prompt(self) -> str:
        """The turns as plain text, for a tokenizer without a chat template."""
        return "\n".join(turn["content"] for turn in self.turns)

    def answers(self) -> Iterator[int]:
        """The places, among the turns and the response, of what the assistant answers: what is trained. A turn of the
        assistant with nothing before it answers nothing."""
        yield from (at for at, turn in enumerate(self.turns) if at and turn["role"] == "assistant")
        yield len(self.turns)


def read_pairs(path: Path) -> list[Pair]:
    """The pairs of a file, or of the files of a folder in path order. ValueError if a record is no pair.

    A file is a JSON array of objects, has an object in each line, or is a table of Parquet or Arrow.
    An object has keys of PAIR_KEYS (an `instruction` may have an `input`), or a conversation: `messages`, or
    `conversations` as of ShareGPT. What follows the assistant's last message is left out.
    """
    found = [pair for file in pair_files(path) for pair in _pairs(file)]
    if not found:
        raise ValueError(f"data.path: expected prompts and responses, found none in {path}; name another file")
    return found


def pair_files(path: Path) -> list[Path]:
    """The file itself; of a folder the tables, or else the files of JSON, in path order."""
    return [file for file in text_files(path) if file == path or file.name.endswith((*JSON_FILES, *TABLES))]


def _pairs(path: Path) -> Iterator[Pair]:
    if tables.is_table(path):
        yield from (pair_of(place, row) for place, row in tables.rows(path, COLUMNS))
        return
    try:
        with opened(path) as file:
            text = file.read().decode()
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile) as error:
        raise ValueError(f"data.path: expected JSON in UTF-8, found other bytes in {path}: {error}") from None
    if text.lstrip()[:1] == "[":
        for number, record in enumerate(parsed(str(path), text), start=1):
            yield pair_of(f"{path}, record {number}", record)
        return
    # A text may hold other characters at which splitlines would divide it.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            place = f"{path}, line {number}"
            yield pair_of(place, parsed(place, line))


def opened(path: Path) -> BinaryIO:
    """The bytes of a file, unpacked if its name ends in .gz."""
    return cast("BinaryIO", gzip.open(path)) if path.name.endswith(".gz") else path.open("rb")


def place_to_mend(message: str) -> str:
    """The file and the place in it of the wrong record that an error names; empty if it names none."""
    found = PLACE.match(message)
    return found[1] if found else ""


def parsed(place: str, text: str | bytes) -> Any:
    """The JSON of a record. ValueError if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{place}: expected a JSON array of objects, or an object in each line, found another text ({why})"
        ) from None


def pair_of(place: str, record: Any) -> Pair:
    """A record as a pair. ValueError, which begins with `place`, if it is none."""
    if not isinstance(record, dict):
        raise ValueError(f"{place}: expected an object with {FORMS}, found {type(record).__name__}")
    answers = [
        key for key in (*(answer for _, answer in PAIR_KEYS), MESSAGES, CONVERSATIONS) if record.get(key) is not None
    ]
    if len(answers) > 1:
        raise ValueError(f"{place}: expected one response, found {' and '.join(answers)}; remove all but one of them")
    if MESSAGES in answers:
        return _conversation(place, record[MESSAGES], "messages")
    if CONVERSATIONS in answers:
        return _conversation(place, _of_sharegpt(place, record), "conversations")
    keys = next((keys for keys in PAIR_KEYS if keys[0] in record and keys[1] in answers), None)
    if keys is None:
        raise ValueError(f"{place}: expected an object with {FORMS}, found the keys {', '.join(record) or 'none'}")
    prompt, response = (text_of(place, key, record[key]) for key in keys)
    if not prompt:
        raise ValueError(f"{place}: expected a text as its {keys[0]}, found an empty one")
    more = text_of(place, "input", record.get("input") or "") if keys[0] == "instruction" else ""
    return Pair(({"role": "user", "content": f"{prompt}\n{more}" if more else prompt},), response)


def _conversation(place: str, turns: Any, key: str) -> Pair:
    are_turns = isinstance(turns, list) and all(isinstance(one, dict) for one in turns)
    last = max((at for at, one in enumerate(turns) if one.get("role") == "assistant"), default=0) if are_turns else 0
    if last == 0:
        raise ValueError(f"{place}: expected {key} of which one after the first is the assistant's, found none")
    plain = [{name: text_of(place, name, one.get(name)) for name in ("role", "content")} for one in turns[: last + 1]]
    return Pair(tuple(plain[:-1]), plain[-1]["content"])


def _of_sharegpt(place: str, record: Mapping[str, Any]) -> Any:
    """The turns of `conversations` by role and content; `from` and `value`, or what they have already. A text `system`
    beside them comes first."""
    turns = record[CONVERSATIONS]
    if not isinstance(turns, list) or not all(isinstance(one, dict) for one in turns):
        return turns
    named = [
        {"role": one.get("from", one.get("role")), "content": one.get("value", one.get("content"))} for one in turns
    ]
    for one in named:
        if not isinstance(one["role"], str) or one["role"] not in ROLES:
            known = ", ".join(ROLES)
            raise ValueError(f"{place}: expected conversations with `from` of {known}, found {one['role']!r}")
        one["role"] = ROLES[one["role"]]
    system = record.get("system")
    first = [{"role": "system", "content": system}] if isinstance(system, str) and system else []
    return [*first, *named]


def text_of(place: str, key: str, value: Any) -> str:
    """The value of a key. ValueError if it is no text."""
    if not isinstance(value, str):
        raise ValueError(f"{place}: expected a text as its {key}, found {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = ascii(value[error.start])[1:-1]
        raise ValueError(f"{place}: expected a text as its {key}, found half a character ({half})") from None
    return value
