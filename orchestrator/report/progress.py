"""How far a running point is: its phase, latest loss, speed and the time of its steps that are left. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from orchestrator.text.units import digits, duration, loss

WAITS = "waits for its turn"
RECENT = 10  # steps whose median is the pace: one slow step must not double the time that is left


class StepProgress(NamedTuple):
    """words: such as "warm-up 3/5". loss: of the latest step. tokens_per_second: of all ranks, the median of the latest
    steps. left_s: the time of the point's own steps that are left at that pace; other points' turns come in addition.
    None: not known."""

    words: str
    loss: float | None = None
    tokens_per_second: float | None = None
    left_s: float | None = None

    @property
    def waits(self) -> bool:
        """Whether another point has its turn."""
        return self.words.startswith(WAITS)

    @property
    def text(self) -> str:
        """The words, the loss and the time left, for a column next to the speed."""
        parts = [self.words]
        parts += [] if self.loss is None else [f"loss {loss(self.loss)}"]
        parts += [] if not self.left_s else [f"{duration(self.left_s)} of steps left"]
        return ", ".join(parts)


def progress(events: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> StepProgress:
    """The progress of a run, from its events, or the last ones of them, and its configuration."""
    steps = [event for event in events if event["event"] == "step"]
    if not steps:
        return StepProgress("building" if not events else "ready")
    if (last := events[-1])["event"] == "variant":
        where = f"{last['how']} ({last['number']} of {last['of']})"
        return StepProgress(f"training the reference again {where}, which bounds the difference")
    measure = config["measure"]
    end = steps[-1].get("of") or measure["warmup_steps"] + measure["steps"]
    left = max(end - steps[-1]["step"], 0)
    recent = steps[-RECENT:]
    pace_s = statistics.median(step["step_ms"] for step in recent) / 1e3
    return StepProgress(
        _words(events, steps[-1], measure),
        steps[-1]["loss"],
        statistics.median(step["tokens_per_second"] for step in recent),
        left * pace_s + _further_s(events, measure, pace_s),
    )


def _further_s(events: Sequence[Mapping[str, Any]], measure: Mapping[str, Any], pace_s: float) -> float:
    """The time of the further rounds for measure.min_s that are not measured yet. A run has them if it takes turns with
    others, and its steps in them are no events."""
    if not any(event["event"] in ("waiting", "turn") for event in events):
        return 0.0
    missing_s: float = max(measure.get("min_s", 0.0) - measure["steps"] * pace_s, 0.0)
    ended = sum(1 for event in events if event["event"] == "round" and event["number"] > measure.get("rounds", 1))
    return missing_s * (1 - min(ended / (_further_rounds(events) or 1), 1))


def _words(events: Sequence[Mapping[str, Any]], last: Mapping[str, Any], measure: Mapping[str, Any]) -> str:
    if of := last.get("of"):
        return f"training {last['step']}/{of}" if last["step"] < of else "ending"
    warmup, counted = measure["warmup_steps"], measure["steps"]
    if events[-1]["event"] == "waiting":
        return f"{WAITS}, {_turn_words(events, measure.get('rounds', 1))}"
    if last["warmup"]:
        return f"warm-up {last['step']}/{warmup}"
    if any(event["event"] == "repeating" for event in events):
        return "measuring loaded rounds again"
    if further := _further_rounds(events):
        turn = next((event["turn"] for event in reversed(events) if event["event"] == "turn"), None)
        rounds = measure.get("rounds", 1) + further
        return f"measuring round {turn}/{rounds}" if turn else f"measuring {further} further rounds"
    if any(event["event"] == "validation" for event in events) or last["step"] >= warmup + counted:
        return "ending"
    return f"measuring {last['step'] - warmup}/{counted}"


def _turn_words(events: Sequence[Mapping[str, Any]], rounds: int) -> str:
    """What a run that waits for a turn does with it."""
    if any(event["event"] == "repeating" for event in events):
        return "to measure a round again"
    return f"round {events[-1]['turn']}/{rounds + _further_rounds(events)}"


def _further_rounds(events: Sequence[Mapping[str, Any]]) -> int:
    """How many rounds follow the configured ones."""
    return next((len(event["rounds"]) for event in events if event["event"] == "extending"), 0)


def step_numbers(event: Mapping[str, Any]) -> str:
    """The numbers of a step's event in one line."""
    return f"loss {loss(event['loss'])}  {digits(event['tokens_per_second'])} tokens/s  {memory_text(event)}"


def memory_text(event: Mapping[str, Any]) -> str:
    """The memory of rank 0 in an event."""
    reserved = f", reserved {digits(event['reserved_mib'])} MiB" if event.get("reserved_mib") is not None else ""
    return f"{event['memory_kind']} {digits(event['memory_mib'])} MiB{reserved}"


def phase(event: Mapping[str, Any]) -> str:
    """What a step belongs to. A training to an end names its last step in each event, and measures none."""
    return "training" if event.get("of") else "warm-up" if event["warmup"] else "measuring"


def step_line(event: Mapping[str, Any], steps: int | None) -> str:
    """A step's event as a line of text. steps: how many the run has in all, if that is known."""
    return f"{phase(event)} step {event['step']}/{event.get('of') or steps or '?'}  {step_numbers(event)}"
