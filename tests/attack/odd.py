"""Odd texts, numbers and bytes, and changes to valid data, from which the inputs of all attack tests are built."""

from __future__ import annotations

import random
from collections.abc import Sequence
from enum import Enum
from typing import Any, Literal, TypeVar, get_args, get_origin

from orchestrator.compose.sweep_file import spelled
from orchestrator.config.strict import type_of

Item = TypeVar("Item")

NUMBERS = [
    *("0", "-1", "1", "2", "3", "00", "+1", "-0", "1_0", "0x10", "0b1", "1e3", "1e-320", "1e308", "1e309", "-1e400"),
    *("9" * 20, "9" * 400, "-" + "9" * 400, "9" * 4400, "0." + "0" * 400 + "1", "1e" + "9" * 30, "1.", ".5", "1.5.2"),
    *(
        "0x" + "f" * 5000,
        "inf",
        "-inf",
        "nan",
        "NaN",
        "Infinity",
        str(2**31),
        str(2**32),
        str(2**63),
        str(2**64),
        "1/2",
        "٣",
        "²",
    ),
]
WORDS = [
    *("", " ", "null", "~", "true", "yes", "off", "none", "auto", "???", "-", "--", "=", "\\", "'", '"', "''", '""'),
    *("x" * 300, "x" * 5000, "a b", "a,b", "a:b", "a=b", "#", "%", "%s", "{}", "{0}", "$HOME", "`id`", "$(id)", ";"),
    *("é", "Ψ", "中文", "😀", "\u202e", "\u0301" * 40, "\ufeff", "\udcff", "a\udc80b", "\x1b[2J", "\x07", "\r", "\t"),
    *("a\nb", "\nerror: x", "\x7f", "\u2028", "\x85", "‮gpj.exe", "__class__", "self", "0", "zlab_canary", "None"),
]
PATHS = [
    *(
        "missing",
        "missing/deeper",
        "user.txt",
        "user.txt/x",
        "folder",
        "loop",
        "gone",
        "pipe",
        "/dev/zero",
        "/dev/null",
    ),
    *("/proc/self/mem", "/proc/x", ".", "..", "folder/..", "~", "~/x", "~nobody-of-this-name/x", "~root/x", "x" * 300),
    *("/".join(["d"] * 600), "./" * 2000 + "x", "a\udcffb", "file:///etc/passwd", "http://localhost:1/x", "weights"),
    *("step-00000001", "-x", "--plan", "a\nb", "outputs/#", "outputs/?", "outputs/%", "outputs/a b", "outputs/é"),
]
INTERPOLATIONS = [
    *("${seed}", "${batch.micro}", "${missing}", "${oc.env:HOME}", "${oc.env:NO_SUCH}", "${oc.decode:'[1,2]'}"),
    *("${oc.create:{a:1}}", "${oc.select:seed}", "${oc.dict.keys:batch}", "${hydra:runtime.cwd}", "${hydra:x}"),
    *("${", "${}", "${${seed}}", "${seed", "$${seed}", "\\${seed}", "${.micro}", "${..seed}", "${batch}", "${now:%Y}"),
    *(
        "${eval:1}",
        "${python:os.system}",
        "${zlab_canary:go}",
        "${output}",
        "${oc.deprecated:seed}",
        "a${seed}b${seed}",
    ),
]
TARGETS = [
    *("{_target_: zlab_canary.go}", "{_target_:os.system,_args_:[id]}", "{_target_: builtins.exec, _args_: ['1']}"),
    *("{_partial_:true}", "{_convert_:all}", "{_recursive_:false,_target_:zlab_canary.go}"),
]
CALLS = ("choice", "range", "interval", "glob", "shuffle", "sort", "tag", "int", "float", "str", "bool", "json_str")


def chosen(chance: random.Random, *lists: Sequence[str]) -> str:
    """A random text from a random list; all lists are equally likely."""
    return chance.choice(chance.choice(lists))


def call(chance: random.Random) -> str:
    """A call of a function of Hydra's grammar, with valid or invalid arguments."""
    name = chance.choice(CALLS)
    if chance.random() < 0.4:
        right = {
            "choice": ["1,2", "stage0,stage1", "[1],[2]", "a", "", "choice(1,2)", "1,2,,"],
            "range": [
                "1,5",
                "1,1000000000",
                "0,1,0",
                "5,1",
                "1,5,-1",
                "0,1,1e-300",
                "start=1,stop=5",
                "1.0,2.0,0.3",
                "1",
            ],
            "interval": ["0,1", "1,0", "0,inf", "nan,1", "start=0,end=1"],
            "glob": ["*", "stage*", "[*]", "[a*,b*],exclude=*", "*,exclude=stage1", "exclude=*", "**", "../*", "[", ""],
        }.get(name, ["1,2,3", "1", "choice(1,2)", "range(1,3)", "[3,1,2]", "1,2,reverse=true", "t1,t2,choice(1,2)", ""])
        return f"{name}({chance.choice(right)})"
    words = [chosen(chance, NUMBERS, WORDS, INTERPOLATIONS) for _ in range(chance.randrange(4))]
    return f"{name}({','.join(words)}{chance.choice((')', ')', '', '))', ',)'))}"


def nested(chance: random.Random) -> str:
    """Lists and mappings of the override grammar: complete, deeply nested, or without a closing bracket."""
    depth = chance.choice((1, 2, 5, 60, 400))
    opening, closing = chance.choice((("[", "]"), ("{a:", "}"), ("(", ")"), ("[[", "]]")))
    return opening * depth + chosen(chance, NUMBERS, WORDS) + closing * (depth - chance.choice((0, 0, 1)))


def value(chance: random.Random) -> str:
    """Anything that may follow a key."""
    what = chance.randrange(12)
    if what == 0:
        return call(chance)
    if what == 1:
        return nested(chance)
    if what == 2:
        return ",".join(chosen(chance, NUMBERS, WORDS) for _ in range(chance.choice((2, 3, 40))))
    if what == 3:
        quote = chance.choice("'\"")
        return quote + chosen(chance, NUMBERS, WORDS) + chance.choice((quote, "", "\\" + quote))
    return chosen(chance, NUMBERS, WORDS, PATHS, INTERPOLATIONS, TARGETS)


def changed(data: bytes, chance: random.Random) -> bytes:
    """`data` with one to five small changes: a part replaced, removed, repeated or reversed, or the end cut off."""
    found = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 5))):
        start = chance.randrange(max(len(found), 1))
        stop = min(len(found), start + chance.choice((1, 1, 2, 8, 64)))
        part = bytes(found[start:stop])
        what = chance.randrange(8)
        if what == 0:
            found = found[:start]
        elif what == 1:
            del found[start:stop]
        elif what == 2:
            found[start:start] = part * chance.choice((1, 3))
        elif what == 3:
            found[start:stop] = part[::-1]
        elif what == 4:
            found[start:stop] = chance.choice((b"null", b"1e999", b"\x00", b"\xff\xfe", b"9" * 400, b"\xed\xa0\x80"))
        else:
            found[start:stop] = chance.choice((chance.randbytes(len(part)), b"\xff" * len(part), b"(" * len(part)))
    return bytes(found)


def fitting(hint: Any, chance: random.Random) -> str:
    """A value of this type, as a user would type it: valid values get past the first checks."""
    kind, optional = type_of(hint)
    if optional and chance.random() < 0.15:
        return "null"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return str(chance.choice(list(kind)).value)
    if get_origin(kind) is Literal:
        return chance.choice(get_args(kind))
    if kind is bool:
        return chance.choice(("true", "false"))
    if kind is int:
        return chance.choice((*map(str, (1, 1, 2, 2, 3, 4, 8, 0, -1, 77, 1024, 10**6, 2**31, 2**63)), "9" * 400))
    if kind is float:
        return chance.choice(("0.5", "1", "0", "1e-3", "0.1", "2.5", "-1.0", "1e308", "1e-320", "9" * 400, "1e300"))
    if get_origin(kind) is list:
        return f"[{','.join(spelled(chosen(chance, WORDS)) for _ in range(chance.randrange(3)))}]"
    if get_origin(kind) is dict:
        return f"{{{spelled(chosen(chance, WORDS))}:{chosen(chance, NUMBERS)}}}"
    return spelled(chosen(chance, WORDS, PATHS))


def misspelled(word: str, chance: random.Random) -> str:
    """The word with one to three characters removed, doubled, replaced or inserted."""
    for _ in range(chance.choice((1, 1, 2, 3))):
        place = chance.randrange(len(word) + 1)
        sign = chance.choice("=,.[]{}()'\"\\ $~+-_:!@/%\t\nxé0😀")
        part = word[place : place + 1]
        word = word[:place] + chance.choice(("", part * 2, sign, sign + part, part.swapcase())) + word[place + 1 :]
    return word
