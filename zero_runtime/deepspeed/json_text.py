"""Loads a configuration from a dict, or from a JSON file with comments. Standard library only."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from zero_runtime.errors import PlanError

LONGEST = 200
# Strings are matched too, so that comment characters inside a string are kept.
_STRING_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/\*.*?\*/', re.DOTALL)
_STRING_OR_TRAILING_COMMA = re.compile(r'"(?:\\.|[^"\\\n])*"|,(?=\s*[}\]])')


def load(config: Mapping[str, Any] | str | Path) -> dict[str, Any]:
    """The configuration as a dict. A file may have //, # and /* */ comments and trailing commas, and be
    HJSON where the package hjson is installed.

    Any other text that is not JSON, and a key that occurs twice in one object, raise PlanError; syntax errors give the
    line.
    """
    if isinstance(config, Mapping):
        return dict(config)
    if not isinstance(config, (str, Path)):
        raise PlanError(f"config: expected a dict or the path of a JSON file, found a {type(config).__name__}")
    if str(config).lstrip().startswith("{"):
        raise PlanError("config: expected a dict or the path of a JSON file, found JSON itself; give json.loads of it")
    path, text = Path(config), None
    try:
        if path.is_file():
            text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a zero byte in the name
        told = error if isinstance(error, UnicodeError) else getattr(error, "strerror", "") or error
        raise PlanError(f"config {shown(str(config))}: expected a JSON file in UTF-8, found: {told}") from error
    if text is None:
        raise PlanError(f"config: expected a dict or the path of a JSON file, found no file {shown(str(config))}")
    try:
        found = _parsed(text)
    except json.JSONDecodeError as error:
        raise PlanError(
            f"config {path}, line {error.lineno}: expected JSON, found: {error.msg} (HJSON, as keys without quotes, "
            "is read if the package hjson is installed)"
        ) from error
    except PlanError as error:
        raise PlanError(f"config {path}: {error}") from error
    except (ValueError, RecursionError) as error:  # a number with thousands of digits, or objects nested too deeply
        raise PlanError(f"config {path}: expected JSON of a configuration, found: {error}") from error
    if not isinstance(found, dict):
        raise PlanError(f"config {path}: expected an object {{...}}, found a {type(found).__name__}")
    return found


def _parsed(text: str) -> Any:
    """The content of JSON with comments; of HJSON too, as in DeepSpeed, if there is a package for it."""
    try:
        return json.loads(_bare(text), object_pairs_hook=_once)
    except json.JSONDecodeError:
        # It is no HJSON either, and the error of JSON is told; hjson raises IndexError where a text ends too soon, and
        # OverflowError for a number beyond every float.
        with suppress(ImportError, ValueError, IndexError, OverflowError):
            hjson = import_module("hjson")
            return hjson.loads(text, object_pairs_hook=_once)
        raise


def _bare(text: str) -> str:
    """The text without comments and trailing commas; lines keep their numbers."""
    text = _STRING_OR_COMMENT.sub(lambda match: _kept(match[0]), text)
    return _STRING_OR_TRAILING_COMMA.sub(lambda match: match[0] if match[0][0] == '"' else "", text)


def shown(value: Any) -> str:
    """A value as text for a message, cut after LONGEST characters."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # ValueError: a number with more digits than Python prints
        return f"a {type(value).__name__} too deep or long to show"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def shown_key(key: Any) -> str:
    """A key as text for a message, without quotes unless it is long or not printable."""
    text = str(key)
    return text if text.isprintable() and len(text) <= LONGEST else shown(text)


def _kept(token: str) -> str:
    return token if token[0] == '"' else "\n" * token.count("\n")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    twice = sorted(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
    if twice:
        told = ", ".join(map(shown_key, twice))
        raise PlanError(f"expected each key once in an object, found {told} more than once; keep one")
    return dict(pairs)
