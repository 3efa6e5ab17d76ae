"""The table of the wings: what each adds to the program, by name.

A wing is a folder here that may import the rest of the program (the trunk), and that the trunk never imports: it asks
this table for a name, and the wing's module is imported when the name is used. A feature begins as a wing, and code
moves to the trunk when two wings need it. tests/house/test_reach.py computes what a run and a sweep import without a
wing, and fails if it grows.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

# The wings' verbs, each with its module, which has `main` and `parser`: `python run.py VERB ...` calls its `main`.
VERBS = {
    "fit": "orchestrator.wings.predict.fit",
    "calibrate": "orchestrator.wings.predict.calibrate",
    "choose": "orchestrator.wings.predict.choose",
    "generate": "orchestrator.wings.generate.generate",
    "export-weights": "orchestrator.commands.export",
    "import": "orchestrator.commands.import_config",
    "export": "orchestrator.commands.export_config",
    "launch": "orchestrator.commands.launch_script",
}

# Entry of a rank of measure=eval, which trains nothing.
EVALUATION = "orchestrator.wings.validation.evaluate:run_rank"
# Meter of the energy of a rank's device.
ENERGY = "orchestrator.wings.energy:meter_of"
# The variable that asks for a fault, and what refuses one that can never act.
FAULT, CHECK_FAULT = "ZLAB_FAULT", "orchestrator.wings.faults:problem_of"
# Modules for what a saved model has besides its weights, and what writes the files next to weights.
TOKENIZER, ADAPTERS = "orchestrator.wings.pretrained.tokenizer", "orchestrator.wings.pretrained.adapters"
WRITE_COMPANIONS = "orchestrator.wings.pretrained.companions:write_companions"
# What a run does beside its steps: the classes of orchestrator/worker/listeners.py's listeners.
LISTENERS = {
    "fault": "orchestrator.wings.faults:FaultListener",
    "validation": "orchestrator.wings.validation.held_out:Validation",
    "examples": "orchestrator.wings.generate.examples:Examples",
    "profile": "orchestrator.wings.profile.profile_rank:Profile",
}
PREDICTOR = "orchestrator.wings.predict.prediction"  # which plans ask: see orchestrator/plan/predictor.py
PREDICTED = "orchestrator.wings.predict.predicted"  # what rank 0 shows beside what it measures


def load(place: str) -> Any:
    """The object that "package.module:attribute" names, or the module that "package.module" names."""
    return resolve_name(place)
