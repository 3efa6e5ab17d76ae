"""Converts the section scheduler to a learning-rate schedule of the runtime. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any

from zero_runtime.deepspeed.json_text import shown
from zero_runtime.deepspeed.schema import BOOL, NUMBER, TEXT, WHOLE, Reader, idle, mapped
from zero_runtime.errors import PlanError
from zero_runtime.optim.lr_schedule import LRRangeTest, LrSchedule, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

_TYPES: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR)
}
_KINDS = {"float": NUMBER, "int": WHOLE, "int | None": WHOLE, "bool": BOOL, "str": TEXT}
_OF_THE_OPTIMIZER = ("lr",)  # a field of WarmupCosineLR: the group's rate, not a key of the section
ScheduleOf = Callable[[float], LrSchedule]  # takes a group's rate


def choose_schedule(section: Mapping[str, Any] | None, reader: Reader) -> ScheduleOf | None:
    """The schedule of a section. None without a section, or if it is invalid: the reader's problems then say why."""
    if section is None:
        return None
    kind = _TYPES.get(section.get("type", ""))
    if kind is None:
        reader.problems.append(
            f"scheduler.type: expected one of {', '.join(_TYPES)}, found {shown(section.get('type'))}; any other "
            "schedule of torch may be handed to initialize as lr_scheduler"
        )
        return None
    own = [field for field in fields(kind) if field.name not in _OF_THE_OPTIMIZER]
    table = {field.name: mapped(_KINDS[str(field.type)]) for field in own} | {"last_batch_iteration": idle(WHOLE)}
    before = len(reader.problems)
    values = reader.read(table, section.get("params", {}), "scheduler.params.")
    missing = [field.name for field in own if field.default is MISSING and field.name not in values]
    if kind is WarmupDecayLR and "total_num_steps" not in values:
        missing.append("total_num_steps")
    if len(reader.problems) == before and missing:
        reader.problems.append(f"scheduler.params: {kind.__name__} needs {', '.join(missing)}")
    if len(reader.problems) > before:
        return None
    takes_lr = len(own) < len(fields(kind))

    def schedule(lr: float) -> LrSchedule:
        return kind(**values, lr=lr) if takes_lr else kind(**values)

    try:
        schedule(0.0)
    except PlanError as error:
        reader.problems.append(str(error))
        return None
    return schedule
