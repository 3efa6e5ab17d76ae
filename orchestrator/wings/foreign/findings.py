"""What became of one key of a foreign configuration, and what a reader of such a configuration returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from orchestrator.config.strict import Word


class Fate(Word):
    mapped = "mapped"
    filled = "filled"
    older = "older"
    idle = "idle"


class KeyFinding(NamedTuple):
    """One key: its path, its value as text, what became of it, our words for it, and what else there is to know."""

    key: str
    value: str
    fate: Fate
    words: tuple[str, ...] = ()
    note: str = ""


@dataclass
class Foreign:
    """What a file or a command line says.

    config: in DeepSpeed's form, with "auto" where a source comes later. words: settings that DeepSpeed's form cannot
    say, by key. keys: findings about keys of the source that have no place in `config`. notes: sentences for the user.
    problems: what is refused. ranks: the number of processes that the source names. must_match: whether the Trainer
    refuses values that differ from its arguments. engine: whose settings they are; those of FSDP are in `config` too.
    """

    source: str
    config: dict[str, Any] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    keys: list[KeyFinding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    ranks: int | None = None
    must_match: bool = False
    engine: str = "DeepSpeed"


def as_word(value: object) -> str:
    """A value as it is typed in an override: numbers as YAML reads them, null, and lists without blanks."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, float):
        text = repr(value)
        mantissa, exponent, power = text.partition("e")
        # YAML 1.1 reads 1e-05 as a text, and 1.0e-05 as a number.
        return f"{mantissa}.0e{power}" if exponent and "." not in mantissa else text
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(as_word, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}: {as_word(inner)}" for key, inner in value.items()) + "}"
    return str(value)
