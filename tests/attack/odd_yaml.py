"""YAML files that are nearly valid: real keys with odd values, other shapes, and YAML that can harm its readers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import odd
import yaml

# In a reader that allows it, each of these starts a conversion or calls something.
TAGS = [
    *(
        "!!python/object/apply:zlab_canary.go []",
        "!!python/object/apply:os.system ['touch called']",
        "!!python/name:os",
    ),
    *(
        "!!python/object/new:zlab_canary.go {}",
        "!!python/module:zlab_canary",
        "!zlab 1",
        "!!binary aGk=",
        "!!set {a, b}",
    ),
    *(
        "!!python/tuple [1, 2]",
        "!!omap [a: 1]",
        "!!timestamp 2001-01-01",
        "!!int x",
        "!!float .inf",
        "!!null x",
        "!!str 1",
    ),
    *(
        "2001-01-01",
        "12:30:45",
        "0o17",
        "0777",
        "1:1:1",
        ".inf",
        ".nan",
        "~",
        "=",
        "<<",
        "y",
        "|",
        ">",
        "&a 1",
        "*a",
        "? ",
    ),
]
BOMBS = [
    "a: &a [*a]",
    "a: &a {b: *a}",
    "&a [*a, *a]",
    "[" * 3000,
    "[" * 900 + "]" * 900,
    "{a: " * 900 + "1" + "}" * 900,
    "- " * 2000 + "x",
    "\n".join(" " * depth + "a:" for depth in range(1200)),
    "a: '" + "x" * 200_000 + "'",
    "\n".join(f"key{number}: {number}" for number in range(3000)),
    "--- a\n--- b\n",
    "%YAML 9.9\n--- {}\n",
    "%TAG ! tag:zlab,2026:\n--- !x {}\n",
    "",
    "\x00",
    "\ufeff",
    "null",
    "3",
    "text",
    "- a",
    "\t",
    "# @package zlab_canary\n",
    "a: 1\na: 2\n",
    "? [a, b]\n: 1\n",
    "1: 2\ntrue: 3\nnull: 4\n",
]


def scalar(chance: random.Random, levels: int = 4) -> str:
    """The text of a value as it may follow `key:`."""
    what = chance.randrange(10) if levels else 9
    if what == 0:
        return chance.choice(TAGS)
    if what == 1:
        return chance.choice(odd.TARGETS)
    if what == 2:
        return f"[{', '.join(scalar(chance, levels - 1) for _ in range(chance.choice((0, 1, 3))))}]"
    if what == 3:
        return f"{{{chance.choice(('a', 'zero', 'x.y', '1'))}: {scalar(chance, levels - 1)}}}"
    text = odd.value(chance)
    if what < 7:
        return text
    return yaml.safe_dump(text, allow_unicode=True, width=10_000).removesuffix("...\n").strip("\n")


def plain(chance: random.Random, levels: int = 4) -> Any:
    """A value as a Python object, for data that is dumped."""
    what = chance.randrange(8) if levels else 7
    if what == 0:
        return [plain(chance, levels - 1) for _ in range(chance.choice((0, 1, 2, 30)))]
    if what == 1:
        return {chance.choice(("zero", "seed", "a.b", "", 3, None, True)): plain(chance, levels - 1)}
    if what < 5:
        return chance.choice((None, True, False, 0, 1, 2, 8, -1, 0.5, 1.5, 1e309, 10**400, float("nan"), 2**63))
    return odd.value(chance)


def inner(found: Any, chance: random.Random) -> Any:
    """A random mapping or list in `found`, or `found` itself."""
    places = [found]
    for place in places:
        children = place.values() if isinstance(place, dict) else place
        places += [one for one in children if isinstance(one, (dict, list)) and one]
    return chance.choice(places)


def reshaped(found: Any, keys: Sequence[str], chance: random.Random) -> Any:
    """`found`, changed in place: one to three values or keys are replaced, removed, repeated or wrapped."""
    for _ in range(chance.choice((1, 1, 2, 3))):
        place = inner(found, chance) if found else found
        key = chance.choice(keys)
        if isinstance(place, dict):
            old = chance.choice(list(place)) if place else key
            what = chance.randrange(6)
            if what == 0:
                place.pop(old, None)
            elif what == 1:
                place[key] = place.pop(old, None)
            elif what == 2:
                place[old] = [place.get(old)]
            elif what == 3:
                place[old] = {key: place.get(old)}
            else:
                place[key if what == 4 else old] = plain(chance)
        elif isinstance(place, list):
            what = chance.randrange(4)
            if what == 0:
                place *= chance.choice((0, 2, 50))
            elif what == 1:
                place.append({key: plain(chance)})
            elif place:
                place[chance.randrange(len(place))] = plain(chance)
    return found


def lines_changed(text: str, keys: Sequence[str], chance: random.Random) -> str:
    """The text with lines inserted, doubled, indented differently, or with other values after their keys."""
    lines = text.splitlines()
    for _ in range(chance.choice((1, 1, 2, 3))):
        place = chance.randrange(len(lines) + 1)
        what = chance.randrange(6)
        if what == 0:
            lines.insert(place, f"{chance.choice(('', '', '  ', chr(9)))}{chance.choice(keys)}: {scalar(chance)}")
        elif place == len(lines):
            lines.append(chance.choice(TAGS))
        elif what == 1:
            lines.insert(place, lines[place])
        elif what == 2:
            lines[place] = chance.choice((" ", "  ", "\t", "- ", "? ")) + lines[place]
        elif what == 3:
            lines[place] = lines[place].partition(":")[0] + f": &a {scalar(chance)}\nx: {{<<: *a}}"
        else:
            lines[place] = lines[place].partition(":")[0] + f": {scalar(chance)}"
    return "\n".join(lines) + "\n"


def document(right: Sequence[str], keys: Sequence[str], chance: random.Random) -> bytes:
    """The bytes of a file: a valid text of `right`, changed as a structure, by lines or by bytes, or an odd text."""
    text, what = chance.choice(right), chance.random()
    if what < 0.4:
        found = reshaped(yaml.safe_load(text), keys, chance)
        text = yaml.safe_dump(found, allow_unicode=True, sort_keys=False)
    elif what < 0.75:
        text = lines_changed(text, keys, chance)
    elif what < 0.85:
        text = chance.choice(
            (chance.choice(BOMBS) + "\n" + text, text + "\n" + chance.choice(BOMBS), chance.choice(BOMBS))
        )
    encoding = chance.choice(("utf-8",) * 12 + ("utf-16", "latin-1", "utf-8-sig"))
    data = text.encode(
        encoding, errors=chance.choice(("replace", "surrogateescape" if encoding == "utf-8" else "replace"))
    )
    return odd.changed(data, chance) if what > 0.85 or chance.random() < 0.05 else data
