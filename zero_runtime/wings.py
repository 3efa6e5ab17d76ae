"""The table of the runtime's wings: what each adds to the trunk, by name.

A wing is a folder here that may import the rest of the runtime (the trunk), and that the trunk never imports: it asks
this table for a name, and the wing's module is imported when the name is used.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

BEGIN_INFERENCE = "zero_runtime.generation.inference:begin_inference"
REFUSE_TRAINING = "zero_runtime.generation.inference:refuse_training"
TURNS = "zero_runtime.generation.gather_turns:GatherTurns"
WRAP_GENERATE = "zero_runtime.generation.generate:wrap_generate"
HEAD_OF = "zero_runtime.parallel.tensor.division:head_of"
REFUSED_OPTIMIZER = "zero_runtime.parallel.tensor.refusals:refused_optimizer"
QUANTISED_SUMS = "zero_runtime.quantised.sums:QuantisedSums"
SENT_CODES = "zero_runtime.quantised.codes:SentCodes"
CODED_MATRICES = "zero_runtime.quantised.chosen:coded_matrices"  # names of the frozen weights that are stored as codes
STORED_CODES = "zero_runtime.quantised.stored:StoredCodes"  # the parameters of a unit whose weights are codes
SPLIT = "zero_runtime.parallel.tensor.slices:Split"
# Makes the backend of CPU ranks that read each other's memory known to torch, under the name in world.py.
REGISTER_SHM = "zero_runtime.same_host.group:register"
SHM_MESSAGES = "zero_runtime.same_host.messages:SharedMessages"
SHM_TROUBLE = "zero_runtime.same_host.probe:trouble"  # why no processes of this machine may do so; empty if they may
SHM_REASON = "zero_runtime.same_host.group:reason"  # why the default group does not do so; empty if it does
# The checkpoints of a run that saves or resumes.
RUN_CHECKPOINTS = "zero_runtime.checkpoint.of_run:RunCheckpoints"
# What opens another library's checkpoint in a folder, or None, and what loads it into a runtime.
FOREIGN_READER = "zero_runtime.deepspeed.foreign_checkpoints.deepspeed:foreign_reader"
LOAD_FOREIGN = "zero_runtime.deepspeed.foreign_checkpoints.source:load_foreign"
# A folder of weights as a source for a model, and the writer of one.
READ_WEIGHTS_FOLDER = "zero_runtime.checkpoint.hugging_face.names:weights_for"
WRITE_WEIGHTS_FOLDER = "zero_runtime.checkpoint.hugging_face.gathered:save_gathered_weights"
# The update rule of an optimizer by its kind, if it is not element-wise.
UPDATE_RULES = {
    "lamb": "zero_runtime.optim.lamb:LambRule",
    "muon": "zero_runtime.optim.muon:MuonRule",
    "onebitadam": "zero_runtime.optim.onebit:OneBitRule",
    "torch": "zero_runtime.optim.torch_rule:TorchRule",
}

# States that are not on the device: room for them, their tier, their bytes; activations, and memory for quick copies.
CHECK_OFFLOAD = "zero_runtime.offload.preflight:check_offload"
OPEN_TIER = "zero_runtime.offload.open:open_tier"
OFFLOAD_BYTES = "zero_runtime.offload.predicted:predicted_bytes"
ACTIVATIONS_ON_HOST = "zero_runtime.activations.on_host:open_memory"
PAGE_LOCKED = "zero_runtime.offload.copy_streams:PageLocked"


def load(place: str) -> Any:
    """The object that "package.module:attribute" names."""
    return resolve_name(place)
