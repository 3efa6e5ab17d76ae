"""The table of the runtime's wings: what each adds to the trunk, by name.

A wing is a folder here that may import the rest of the runtime (the trunk), and that the trunk never imports: it asks
this table for a name, and the wing's module is imported when the name is used.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

BEGIN_INFERENCE = "zero_runtime.generation.inference:begin_inference"
REFUSE_TRAINING = "zero_runtime.generation.inference:refuse_training"
STORED_CODES = "zero_runtime.quantised.codes:StoredCodes"
TURNS = "zero_runtime.generation.gather_turns:GatherTurns"
WRAP_GENERATE = "zero_runtime.generation.generate:wrap_generate"
HEAD_OF = "zero_runtime.parallel.tensor.division:head_of"
REFUSED_OPTIMIZER = "zero_runtime.parallel.tensor.refusals:refused_optimizer"
QUANTISED_SUMS = "zero_runtime.quantised.sums:QuantisedSums"
SENT_CODES = "zero_runtime.quantised.codes:SentCodes"
SPLIT = "zero_runtime.parallel.tensor.slices:Split"


def load(place: str) -> Any:
    """The object that "package.module:attribute" names."""
    return resolve_name(place)
