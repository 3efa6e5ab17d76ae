"""The table of the wings: what each adds to the program, by name.

A wing is a folder here that may import the rest of the program (the trunk), and that the trunk never imports: it asks
this table for a name, and the wing's module is imported when the name is used. A feature begins as a wing, and code
moves to the trunk when two wings need it. tests/house/test_reach.py computes what a run and a sweep import without a
wing, and fails if it grows.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

# The wings' verbs, each with its module, which has `main` and `parser`: `python run.py VERB ...` calls its `main`.
VERBS = {
    "fit": "orchestrator.wings.predict.fit",
    "calibrate": "orchestrator.wings.predict.calibrate",
    "choose": "orchestrator.wings.predict.choose",
    "search": "orchestrator.wings.optuna.search",
    "generate": "orchestrator.wings.generate.generate",
    "export-weights": "orchestrator.wings.foreign.export_weights",
    "import": "orchestrator.wings.foreign.import_config",
    "export": "orchestrator.wings.foreign.export_config",
    "launch": "orchestrator.wings.scripts.launch_script",
}

# For a command line: what --help prints, what a wrong word probably meant, and models that are named by a path or by
# their name on the hub.
HELP, SUGGESTIONS = "orchestrator.wings.words.help_topics:page", "orchestrator.wings.words.suggestions"
NAMES = "orchestrator.wings.words.names:spelled"
# Other engines that train a point, by engine.kind: modules with the contract of orchestrator/wings/engines/contract.py.
ENGINES = {
    "deepspeed": "orchestrator.wings.engines.deepspeed",
    "fsdp2": "orchestrator.wings.engines.fsdp2",
    "ddp": "orchestrator.wings.engines.ddp",
    "plain": "orchestrator.wings.engines.plain",
}
# What points need where other engines are among them: rules, the same work to count, and a reference.
COMPARE_ENGINES = "orchestrator.wings.engines.compared:completed"
# Finds the micro-batch of points with batch.at_limit.
AT_LIMIT = "orchestrator.wings.engines.at_limit:chosen"
CHOOSE_ENGINES = "orchestrator.wings.engines.choose:main"  # `choose` with other engines than ours
# What builds another engine for a rank, in place of worker/setup.py's build_runtime.
BUILD_ENGINE = "orchestrator.wings.engines.foreign_runtime:build"
# Entry of a rank of measure=eval, which trains nothing.
EVALUATION = "orchestrator.wings.validation.evaluate:run_rank"
# The variable that asks for a fault, and what refuses one that can never act.
FAULT, CHECK_FAULT = "ZLAB_FAULT", "orchestrator.wings.faults:problem_of"
# Modules for what a saved model has besides its weights, and what writes the files next to weights.
TOKENIZER, ADAPTERS = "orchestrator.wings.pretrained.tokenizer", "orchestrator.wings.pretrained.adapters"
# What kind of model a configuration describes and what its batches hold; its class of transformers; its data.
KINDS, MODEL_CLASSES = "orchestrator.wings.kinds.kind", "orchestrator.wings.kinds.classes"
KIND_DATA = "orchestrator.wings.kinds.batches:build"
PACKS = "orchestrator.wings.kinds.classes:take_packed_rows"  # makes a model take rows that several samples share
CASTS = "orchestrator.wings.kinds.kept_dtypes:cast_around"  # makes modules compute in the dtype that they keep
PAIRS = "orchestrator.wings.pairs.windows"  # the windows of data=pairs
FIRST_RECORD = "orchestrator.wings.pairs.first_record:problem"  # of data.path, before anything starts
PLACE_TO_MEND = "orchestrator.wings.pairs.pairs_file:place_to_mend"  # of a wrong record that ended a run
TEXT_RECORDS = "orchestrator.wings.pairs.text_records"  # texts of .jsonl and of compressed files
ADAPTER_FOLDER = "orchestrator.wings.pretrained.adapter_folder"  # a model.path or model.adapter with adapters
WRITE_COMPANIONS = "orchestrator.wings.pretrained.companions:write_companions"
USAGE = "orchestrator.wings.usage:memory_now"  # the memory of a rank in its events
GPUS = "orchestrator.wings.gpus:memory_text"  # for a watcher: what this machine's GPUs hold now
# What a run does beside its steps: the classes of orchestrator/worker/listeners.py's listeners.
LISTENERS = {
    "energy": "orchestrator.wings.energy:Energy",
    "fault": "orchestrator.wings.faults:FaultListener",
    "validation": "orchestrator.wings.validation.held_out:Validation",
    "examples": "orchestrator.wings.generate.examples:Examples",
    "profile": "orchestrator.wings.profile.profile_rank:Profile",
    "work": "orchestrator.wings.engines.work:CountedWork",
}
CODED_BROKEN = "orchestrator.wings.coded:broken"  # the rule of frozen weights in codes that a point breaks
# Module of tensor and sequence parallelism, for a configuration that divides its model or its sequences.
DIVIDED = "orchestrator.wings.divided"
PREDICTOR = "orchestrator.wings.predict.prediction"  # which plans ask: see orchestrator/planning/predictor.py
PREDICTED = "orchestrator.wings.predict.predicted"  # what rank 0 shows beside what it measures
# The clusters beside this machine, by cluster.kind: see SweepCluster in launch/cluster.py.
CLUSTERS = {"slurm": "orchestrator.wings.slurm.sweep:SlurmCluster"}
BUNDLE = "orchestrator.wings.bundle:write"  # what `zlab doctor` writes for an issue
ASK_SLURM = "orchestrator.wings.slurm.tools:ask"  # for `zlab doctor`: what one of SLURM's tools prints
# For a rank that another launcher has started: runs it.
JOIN = "orchestrator.wings.torchrun.join:join"
# For a task of the user's own srun: sets the variables of a rank.
PLACE_IN_STEP = "orchestrator.wings.slurm.rank:say_place_in_step"
# Modules of what a comparison shows besides the trunk's numbers, in the order of the columns, and of what is said of a
# run and after a comparison: orchestrator/report/extras.py says what each has.
COLUMNS = (
    "orchestrator.wings.engines.columns",
    "orchestrator.wings.validation.columns",
    "orchestrator.wings.profile.extras",
    "orchestrator.wings.lossy",
    "orchestrator.wings.transport",
)
SUMMARIES = ("orchestrator.wings.profile.extras", "orchestrator.wings.engines.columns")
# Module of which rows of a comparison have a place, and in which table: see orchestrator/report/extras.py.
PLACES = "orchestrator.wings.engines.places"
# Who writes more of a sweep's report: functions that return a ReportPart (orchestrator/report/comparison.py).
REPORT_PARTS = ("orchestrator.wings.page.files:part",)
# Modules of what the page shows of other wings: `section`, `markdown` and `figures` of the points of a report.
REPORT_SECTIONS = ("orchestrator.wings.engines.section", "orchestrator.wings.profile.profile_page")


def load(place: str) -> Any:
    """The object that "package.module:attribute" names, or the module that "package.module" names."""
    module, _, name = place.partition(":")
    found = import_module(module)  # resolve_name would hide why a module cannot be imported
    return getattr(found, name) if name else found
