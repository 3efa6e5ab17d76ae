"""A quick check of overrides against the files of conf/ and the configuration's dataclasses, without Hydra."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any, get_origin

from orchestrator.compose import suggestions
from orchestrator.compose.settable import OPEN_KEYS, WHOLE_FILES, Tree
from orchestrator.compose.sweep_file import SweepFile
from orchestrator.config.strict import convert, describe, wanted
from orchestrator.text.paths import program

SWEEP_KEYS = tuple(one.name for one in fields(SweepFile))
SWEEP_CALL = re.compile(r"^(choice|range|interval|glob|shuffle|sort|tag)\(.*\)$", re.DOTALL)
CALL = re.compile(r"^\w+\(.*\)$", re.DOTALL)
WORD = re.compile(r"^(?P<sign>\+\+|\+|~)?(?P<key>[^=]+?)(?P<equals>=)?(?P<value>(?<==).*)?$", re.DOTALL)
NUMBERS = (
    (int, re.compile(r"^[+-]?\d(_?\d)*$")),
    (float, re.compile(r"^[+-]?(\d[\d_]*\.?\d*|\.\d+)(e[+-]?\d+)?$", re.I)),
)


def check(words: Sequence[str], tree: Tree, *, multirun: bool, flags: Sequence[str] = ()) -> list[str]:
    """One line for each problem, with the most similar valid spelling.

    `flags`: the flags of the command line that belong into the commands that are proposed.
    """
    problems, words = _spaced(words)
    lists: list[str] = []
    for word in words:
        match = WORD.match(word)
        if match is None or (match["equals"] is None and match["sign"] != "~"):
            problems.append(suggestions.word(word, [other for other in words if other != word], tree))
            continue
        sign, key, value = match["sign"] or "", match["key"].strip(), match["value"]
        problems += _check_key(sign, key, value, tree) or _check_value(key, value, tree)
        if value is not None and _is_sweep(value.strip()):
            lists.append(word)
            if key == "sweeps":
                problems.append("sweeps takes one file: its own params are the lists")
    # With a sweep file a list of values needs no -m.
    if lists and not multirun and not any(word.startswith("sweeps=") for word in words):
        settings = [word for word in words if "=" in word or word.startswith("~")]
        line = f"{program()} {shlex.join(['-m', *flags, *settings])}"
        problems.append(f"a list of values ({' '.join(lists)}) needs -m (sweep): {line}")
    return list(dict.fromkeys(problems))


def _spaced(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Problems for settings typed as several words ("zero = stage2", "zero=stage1, stage2"), and all other words."""
    problems, others, parts = [], [], list(words)
    while parts:
        typed = [parts.pop(0)]
        while parts and (typed[-1].endswith(("=", ",")) or parts[0].startswith("=")) and "=" not in parts[0].strip("="):
            typed.append(parts.pop(0))
        if len(typed) > 1:
            problems.append(f"'{' '.join(typed)}' has spaces around = or after a comma: write {''.join(typed)}")
        else:
            others += typed
    return problems, others


def _check_key(sign: str, key: str, value: str | None, tree: Tree) -> list[str]:
    if key == "hydra" or key.startswith(("hydra.", "hydra/")):
        return [f"'{key}' has no effect here: -m sweeps, and output=FOLDER says where results go"]
    if key in SWEEP_KEYS:
        typed = {"seeds": "-m seed=1,2,3", "prune": "--prune off"}.get(key, "")
        hint = f"; on a line it is {typed}" if typed else ""
        return [f"'{key}' is a key of a sweep's file: write it into sweeps/NAME.yaml{hint}"]
    if sign == "~" and (key in tree.groups or key in tree.keys) and key not in WHOLE_FILES:
        return [] if _is_open(key) else [f"~{key}: a run needs {key}; give it another value"]
    if key in tree.groups:
        if sign in ("+", "++"):
            return [f"{key} is always chosen: write {key}={value} without the {sign}"]
        return []
    if key in tree.keys:
        return []
    if _is_open(key) and (sign in ("+", "++") or _below_known(key, tree)):
        return []
    return [f"'{key}' is not a setting.{suggestions.key(key, value, tree)}"]


def _is_open(key: str) -> bool:
    return key.startswith(tuple(f"{open_key}." for open_key in OPEN_KEYS))


def _below_known(key: str, tree: Tree) -> bool:
    parent = key.rpartition(".")[0]
    return parent not in OPEN_KEYS and (parent in tree.keys or _below_known(parent, tree))


def _check_value(key: str, value: str | None, tree: Tree) -> list[str]:
    if value is None or "${" in value or key not in (tree.groups.keys() | tree.keys.keys()):
        return []
    problems = []
    for text in [value.strip()] if key in tree.groups and _is_list(value.strip()) else elements(value):
        problem = _check_option(key, text, tree) if key in tree.groups else _check_scalar(key, text, tree.keys[key])
        problem = problem or _check_name(key, text, tree)
        problems += [problem] if problem else []
    return problems


def _check_name(key: str, text: str, tree: Tree) -> str | None:
    """A name chooses nothing: model.name=gpt2 would call the model gpt2 that the group `model` has chosen."""
    group, _, last = key.rpartition(".")
    if last != "name" or _unquote(text) not in tree.groups.get(group, ()):
        return None
    return f"{key}={text}: {key} is a name and chooses nothing. Did you mean '{group}={_unquote(text)}'?"


def _check_option(group: str, text: str, tree: Tree) -> str | None:
    if text.startswith("["):
        names = ",".join(part.strip() for part in _split_commas(text.strip("[]")))
        line = f"{program()} -m {group}={names}" if "," in names else f"{group}={names}"
        return f"{group} takes one option, found the list {text}. Did you mean '{line}'?"
    options = tree.groups[group]
    option = _unquote(text).removesuffix(".yaml")
    if option in options or text.startswith("{"):
        return None
    return f"{group} has no option '{option}'.{suggestions.option(group, option, options)}"


def _check_scalar(key: str, text: str, hint: Any) -> str | None:
    if hint is Any or get_origin(hint) is dict or CALL.match(text):
        return None
    try:
        convert(hint, scalar(text))
    except ValueError:
        expected = _wanted(hint, text)
        near = suggestions.near_value(text, re.findall(r"\w+", expected)) if expected.startswith("one of") else None
        return f"{key}={text}: expected {expected}" + (f". Did you mean '{near}'?" if near else "")
    return None


def _wanted(hint: Any, text: str) -> str:
    try:
        return wanted(hint, scalar(text))
    except ValueError:  # more digits than Python converts
        return describe(hint)


def elements(value: str) -> Iterator[str]:
    """The single values in a plain value, in a list "a,b" or in choice(a,b). Other sweep functions yield nothing here:
    Hydra checks them."""
    text = value.strip()
    if text.startswith("choice(") and text.endswith(")"):
        text = text[len("choice(") : -1]
    elif SWEEP_CALL.match(text):
        return
    if _is_list(text):
        return
    yield from (part.strip() for part in _split_commas(text))


def scalar(text: str) -> object:
    """The value as Hydra's grammar reads it: quoted text, null, true, false, a number, else text."""
    if _unquote(text) != text:
        return _unquote(text)
    if text.lower() in ("null", "true", "false"):
        return {"null": None, "true": True, "false": False}[text.lower()]
    for kind, pattern in NUMBERS:
        if pattern.match(text):
            return kind(text)
    return float(text) if text.lower().lstrip("+-") in ("inf", "nan") else text


def _is_sweep(value: str) -> bool:
    return SWEEP_CALL.match(value) is not None or len(list(_split_commas(value))) > 1


def _is_list(text: str) -> bool:
    """Whether the text is a single value that is itself a list, "[a,b]"."""
    return text.startswith("[") and len(list(_split_commas(text))) == 1


def _split_commas(text: str) -> Iterator[str]:
    """The parts of the text between commas, except commas inside brackets or quotes."""
    depth, quote, part = 0, "", ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        elif sign in "([{":
            depth += 1
        elif sign in ")]}":
            depth -= 1
        elif sign == "," and depth == 0:
            yield part
            part = ""
            continue
        part += sign
    yield part


def _unquote(text: str) -> str:
    quoted = len(text) >= 2 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if quoted else text
