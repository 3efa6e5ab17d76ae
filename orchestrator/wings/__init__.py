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
    "export-weights": "orchestrator.wings.foreign.export_weights",
    "import": "orchestrator.wings.foreign.import_config",
    "export": "orchestrator.wings.foreign.export_config",
    "launch": "orchestrator.wings.scripts.launch_script",
}

# The clusters beside this machine, by cluster.kind: see SweepCluster in launch/cluster.py.
CLUSTERS = {"slurm": "orchestrator.wings.slurm.sweep:SlurmCluster"}
ASK_SLURM = "orchestrator.wings.slurm.tools:ask"  # for `zlab doctor`: what one of SLURM's tools prints
# For a rank that another launcher has started: runs it.
JOIN = "orchestrator.wings.torchrun.join:join"
# For a task of the user's own srun: sets the variables of a rank.
PLACE_IN_STEP = "orchestrator.wings.slurm.rank:say_place_in_step"


def load(place: str) -> Any:
    """The object that "package.module:attribute" names, or the module that "package.module" names."""
    return resolve_name(place)
