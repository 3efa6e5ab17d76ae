"""DeepSpeed's `runtime.lr_schedules`: the five schedules of the section scheduler as classes for a torch optimizer.

`initialize` returns one of them for a section, and takes one as `lr_scheduler`.
"""

from __future__ import annotations

import logging
from dataclasses import fields
from typing import Any

import torch

from zero_runtime.deepspeed.schedule_section import ScheduleOf, choose_schedule
from zero_runtime.deepspeed.schedules import JsonSchedule
from zero_runtime.deepspeed.schema import Reader
from zero_runtime.errors import PlanError
from zero_runtime.optim import lr_schedule

VALID_LR_SCHEDULES = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]


class _Schedule(JsonSchedule):
    """Takes a torch optimizer and the arguments of the section, by position in DeepSpeed's order or by name."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, *given: Any, last_batch_iteration: int = -1, **named: Any
    ) -> None:
        kind = type(self).__name__
        params = dict(zip(_arguments(kind), given, strict=False)) | named
        reader = Reader()
        chosen = choose_schedule({"type": kind, "params": params}, reader)
        reader.finish()
        assert chosen is not None
        optimizer = getattr(optimizer, "optimizer", optimizer)
        if chosen.cycles_momentum:
            raise PlanError(
                f"{kind}: it cycles the momentum, which the section scheduler alone can say; write it there"
            )
        for note in reader.notes:
            logging.getLogger("zero_runtime").warning(note)
        super().__init__(optimizer, chosen)
        if last_batch_iteration >= 0:
            self.step(last_batch_iteration)


def _class_of(kind: str) -> type[_Schedule]:
    return type(kind, (_Schedule,), {"__doc__": getattr(lr_schedule, kind).__doc__, "__module__": __name__})


LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR = map(_class_of, VALID_LR_SCHEDULES)


def of_section(optimizer: torch.optim.Optimizer, schedule_of: ScheduleOf) -> JsonSchedule:
    """The schedule of a section that was read, as an instance of its class."""
    kind = globals()[schedule_of.kind.__name__]
    made: JsonSchedule = kind.__new__(kind)
    JsonSchedule.__init__(made, optimizer, schedule_of)
    return made


def _arguments(kind: str) -> list[str]:
    """The names of a schedule's arguments, in DeepSpeed's order."""
    names = [field.name for field in fields(getattr(lr_schedule, kind)) if field.name != "lr"]
    return sorted(names, key=lambda name: name != "total_num_steps")
