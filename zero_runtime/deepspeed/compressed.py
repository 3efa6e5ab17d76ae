"""Reads the keys that send fewer bytes: ZeRO++'s quantised messages, and what 1-bit Adam needs of the other keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zero_runtime.deepspeed.optimizer_section import ChosenOptimizer
from zero_runtime.deepspeed.schema import Reader
from zero_runtime.errors import PlanError
from zero_runtime.optim.configs import OneBitAdamConfig
from zero_runtime.plan import ZeroPlan
from zero_runtime.wire import EXACT, Wire

_SECTION = "zero_optimization"
_LEVEL = f"{_SECTION}.stage"
_GATHERS, _SUMS = "zero_quantized_weights", "zero_quantized_gradients"
_COMMAND_LINE = {_GATHERS: "zero.gather_dtype=int8", _SUMS: "zero.reduce_dtype=int4"}
_NOTES = {
    _GATHERS: (
        "zero_quantized_weights: every gather sends int8 codes with a scale for 256 elements; DeepSpeed rounds to fp16 "
        "first, has a scale for up to 16,000 elements, and gathers parameters below "
        "stage3_param_persistence_threshold exactly"
    ),
    _SUMS: (
        "zero_quantized_gradients: every gradient is sent as int4 codes and rounded once; DeepSpeed sums exactly if "
        "all ranks are on one node, in silence; on several nodes it rounds twice, and not at all what has one dimension"
    ),
}
_ONE_BIT_NOTE = (
    "OneBitAdam: moments are corrected for their bias here; DeepSpeed's (0.19.8 has none any more) corrects none, "
    "whatever bias_correction says, which makes its updates larger unless freeze_step is long against 1 / (1 - beta2), "
    "and its first step updates nothing; signs have a scale for a rank's part of a unit here, for a parameter there"
)


def read_wire(zero: Mapping[str, Any], plan: ZeroPlan, reader: Reader) -> Wire:
    """The dtypes of quantised messages in the section zero_optimization, whose plan this is.

    DeepSpeed quantises at stage 3 over all ranks, and ignores the keys elsewhere; there they are refused.
    """
    reader.unused(_SECTION, zero, [name for name in _NOTES if zero.get(name) is False])
    wanted = [name for name in _NOTES if zero.get(name)]
    if not wanted or _LEVEL in reader.refused:
        return EXACT
    for name in wanted:
        where = f"{_SECTION}.{name}"
        if plan.stage != 3:
            here = f"{_COMMAND_LINE[name]} of the command line is the same at stages 1 and 2"
            reader.refuse(
                where,
                f"needs stage 3, found stage {plan.stage}, where DeepSpeed ignores it ({here}); set stage to 3, or "
                "leave it out",
            )
        elif plan.shard_ranks is not None:
            reader.refuse(
                where,
                f"needs shards over all ranks, found mics_shard_size {plan.shard_ranks}, with which DeepSpeed does "
                "not quantise gathers; leave one of them out",
            )
    reader.notes += [_NOTES[name] for name in wanted]
    return Wire("int8" if _GATHERS in wanted else None, "int4" if _SUMS in wanted else None)


def check_one_bit(chosen: ChosenOptimizer | None, plan: ZeroPlan, clip_norm: float | None, reader: Reader) -> None:
    """Add to the reader's problems what 1-bit Adam cannot run with, if it is the optimizer."""
    if chosen is None or not isinstance(chosen.config, OneBitAdamConfig):
        return
    if plan.stage > 1 and _LEVEL not in reader.refused:
        reader.refuse(
            _LEVEL,
            f"OneBitAdam needs stage 0 or 1, found stage {plan.stage}, which sums gradients as they arrive "
            "(DeepSpeed had it at stage 0 alone); set it to 0 or 1",
        )
    if clip_norm:
        reader.refuse(
            "gradient_clipping",
            f"OneBitAdam cannot clip here, found {clip_norm}: after freeze_step gradients are not summed, so that "
            "their norm is not known (DeepSpeed then clipped each rank's own gradients by their own norm); set it to 0",
        )
    reader.notes.append(_ONE_BIT_NOTE)
    if plan.stage == 1:
        reader.notes.append("OneBitAdam: DeepSpeed refused stage 1 with it, which has the bits of stage 0 here")


def check_trained(wire: Wire) -> None:
    """Raise PlanError for quantised messages of a model none of whose parameters is trained."""
    if wire != EXACT:
        names = " and ".join(name for name, dtype in ((_GATHERS, wire.gather), (_SUMS, wire.reduce)) if dtype)
        raise PlanError(
            f"{_SECTION}: {names}: expected a model that is trained, found one whose parameters are all frozen, which "
            "is gathered exactly; leave it out"
        )
