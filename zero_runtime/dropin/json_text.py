"""The configuration as it is handed over: a dict, or a file in JSON with comments. Standard library only."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero_runtime.errors import PlanError

# A string is kept whole: what looks like a comment inside it is none.
_STRING_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/\*.*?\*/', re.DOTALL)
_STRING_OR_TRAILING_COMMA = re.compile(r'"(?:\\.|[^"\\\n])*"|,(?=\s*[}\]])')


def load(config: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """The configuration as a dict. In a file //, # and /* */ comments and trailing commas are allowed; a key that
    stands twice in one object, and all that JSON does not know, is a PlanError with its line."""
    if isinstance(config, Mapping):
        return dict(config)
    if not isinstance(config, (str, Path)):
        raise PlanError(f"config: expected a dict or the path of a JSON file, found a {type(config).__name__}")
    path = Path(config)
    if not path.is_file():
        raise PlanError(f"config: expected a dict or the path of a JSON file, found no file {str(config)!r}")
    try:
        found = json.loads(_bare(path.read_text(encoding="utf-8")), object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        raise PlanError(f"config {path}, line {error.lineno}: expected JSON, found: {error.msg}") from error
    except PlanError as error:
        raise PlanError(f"config {path}: {error}") from error
    if not isinstance(found, dict):
        raise PlanError(f"config {path}: expected an object {{...}}, found a {type(found).__name__}")
    return found


def _bare(text: str) -> str:
    """Without comments and trailing commas; lines keep their numbers."""
    text = _STRING_OR_COMMENT.sub(lambda match: _kept(match[0]), text)
    return _STRING_OR_TRAILING_COMMA.sub(lambda match: match[0] if match[0][0] == '"' else "", text)


def _kept(token: str) -> str:
    return token if token[0] == '"' else "\n" * token.count("\n")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise PlanError(f"expected each key once in an object, found {', '.join(twice)} more than once; keep one")
    return dict(pairs)
