"""Common parts of the attack tests: inputs by number, the sandbox around each input, and counts of failures.

An input depends only on its test, its number and a seed. `ZLAB_ATTACK_SEED=WORD` gives other inputs;
`ZLAB_ATTACK_ONLY=7,12` tries only these numbers, for example to repeat an input that failed.
"""

from __future__ import annotations

import os
import random
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest
from harness.attack_counts import Tally
from sandbox import SANDBOX, Endless, Stopped

SEED = os.environ.get("ZLAB_ATTACK_SEED", "14")
ONLY = os.environ.get("ZLAB_ATTACK_ONLY", "")
# Kinds of failures, in the order in which their counts are printed.
WRONG = ("tracebacks", "wrong exit codes", "unclear messages", "endless", "started", "imported", "changed")
SHOWN = 12  # failed inputs that are printed
Result = TypeVar("Result")


class Wrong(AssertionError):
    """The product gave a wrong answer. `kind` is one of WRONG."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Trial:
    """One input. `chance` generates it; `shown` is set to the text that can be typed or written to repeat it."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.shown: object = "(none yet)"

    def watched(
        self, call: Callable[[], Result], *, may_write: Sequence[Path] = (), may_import: Sequence[str] = ()
    ) -> Result:
        """Returns the product's answer; raises Stopped if it did something forbidden."""
        with SANDBOX.watching(may_write, may_import):
            return call()


def numbers(short: int, long: int) -> list[object]:
    """Input numbers for two tests: those of every run of the suite, and the others up to `long`."""
    if ONLY:
        return [pytest.param([int(one) for one in ONLY.split(",")], id="only")]
    return [pytest.param(range(short), id="short"), pytest.param(range(short, long), marks=pytest.mark.full, id="long")]


def attack(door: str, tried: Sequence[int], tally: Tally, case: Callable[[Trial], None]) -> None:
    """Tries every input, then fails with the first ones that went wrong. `case` raises Wrong or the product's error."""
    counts = dict.fromkeys(WRONG, 0)
    told = []
    for number in tried:
        trial = Trial(random.Random(f"{SEED} {door} {number}"))
        if problem := _problem_of(trial, case):
            kind, text = problem
            counts[kind] += 1
            told.append(f"seed {SEED}, input {number}: {kind}\n{trial.shown}\n{text}")
    tally(door, inputs=len(tried), **{kind.replace(" ", "_"): count for kind, count in counts.items()})
    if told:
        again = f"ZLAB_ATTACK_SEED={SEED} ZLAB_ATTACK_ONLY={','.join(one.split()[3].rstrip(':') for one in told)}"
        more = f"\n\nand {len(told) - SHOWN} more" if len(told) > SHOWN else ""
        pytest.fail(f"{door}: try again with {again}\n\n" + "\n\n".join(told[:SHOWN]) + more, pytrace=False)


def _problem_of(trial: Trial, case: Callable[[Trial], None]) -> tuple[str, str] | None:
    try:
        case(trial)
    except Wrong as wrong:
        return wrong.kind, str(wrong)
    except Endless as endless:
        return "endless", _trace(endless)
    except (Stopped, Exception) as error:
        # The product may have turned what the sandbox raised into another error.
        return (SANDBOX.seen[0][0] if SANDBOX.seen else "tracebacks"), _trace(error)
    except SystemExit as end:
        return "wrong exit codes", f"SystemExit({end.code!r})"
    return SANDBOX.seen[0] if SANDBOX.seen else None


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-3000:]
