"""The page of --help, generated from the files of conf/ and the configuration's dataclasses."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any, get_origin

from orchestrator.compose.settable import OPEN_KEYS, Tree
from orchestrator.config.strict import describe
from orchestrator.text.paths import program

WIDTH = 120
# What `--help` prints; PROGRAM is replaced by how this program is started.
SHORT = """\
Which ZeRO stage, precision, offload and batch is the fastest that fits?

  PROGRAM zero=stage2 precision=bf16               one run
  PROGRAM -m zero=stage1,stage2 batch.micro=2,4    a sweep, with one table
  PROGRAM sweeps=stages                            a sweep from a file of sweeps/
  PROGRAM measure=train data=pairs data.path=FILE  trains on your own prompts
  torchrun --nproc-per-node 2 run.py zero=stage3   joins processes

Verbs (PROGRAM VERB --help)
  fit model=FOLDER hardware=2xNAME what fits, and why; no GPU, no weights
  choose model=NAME                the fastest that fits, with a few short runs
  search optimizer.lr=1e-5..1e-3   the best values, which Optuna proposes
  calibrate                        measures what predicted speeds need
  list, status, watch, logs        sweeps of this folder, from any terminal
  report, compare, ui, sync        tables, pictures, MLflow
  cancel, resume, retry            ends, goes on, runs failed points again
  import ds_config.json            your DeepSpeed setup as settings
  export RUN --to deepspeed        a point for another engine
  export-weights CHECKPOINT OUT    a checkpoint as Hugging Face files; --merge
  generate model.path=FOLDER       text from a model
  launch --ranks 2 SCRIPT.py       your own script on ranks of this machine
  doctor, io-bench FOLDER          what this machine can run; a drive's speed
  completion bash                  tab completion; also zsh, fish

Flags
  --plan        what a line would run, predicted; starts nothing
  --fresh       measure again what was measured      --retry error,oom,...
  --detach      return, and leave the sweep running  --prune off
  --json        one JSON document on stdout          --version

--help all: every group, option, setting and flag     --help WORD: what it means
Exit codes: 0 all answered, 1 a point failed, 2 the line was wrong, 3 points are
left, 4 nothing fits, 130 stopped"""
HEAD = """\
All groups, settings and flags; `--help` has the verbs.
"""
# Keys that are defined by other libraries; a + adds one that the option's file does not have.
OPEN = (
    ("model.config.KEY", "the architecture's own: model.config.n_layer=4, +model.config.KEY=VALUE"),
    ("optimizer.arguments.KEY", "those of torch.optim, with optimizer=torch"),
    (
        "engine.deepspeed.KEY",
        "an engine's own, and of fsdp2, ddp: engine.deepspeed.zero_optimization.overlap_comm=false",
    ),
    ("cluster.additional.KEY", "any other option of sbatch: +cluster.additional.reservation=friday"),
)
TAIL = """\
Flags
  -m, --multirun       sweep: a=1,2  a=range(1,5)  a=choice(x,y) are lists of values
  -c, --cfg job        show the composed configuration instead of running   (-p GROUP: a part of it, --resolve)
  -i, --info           how Hydra found and put together the configuration
  -cd, --config-dir    a folder with options of your own, laid out as conf/; conf/ and sweeps/ here are used too
      --plan           the points of a sweep, predicted and decided; nothing is started
      --fresh          measure again what was measured      --retry error,oom,...   run those again
      --prune off      run also what cannot fit             --detach   leave the sweep running and return
      --anchor POINT   measure this point once more, to see what changed since it was measured
      --max-points N   let a sweep have more than 10,000 points
      --json           one JSON document on stdout at the end, and all else on stderr; every verb has it or says why not
      --version        of zero-lab; VERB --help has the usage of a verb
      --help WORD      what a group, a key or an option means        --hydra-help: Hydra's flags

Exit codes: 0 every point has its answer (out of memory is one), 1 at least one failed, 2 the command was wrong and
nothing was started, 3 some points are left, 4 nothing fits, 130 stopped."""


def short() -> str:
    """The page of what is typed most, of at most 40 lines and 80 columns where the program's name is short."""
    return SHORT.replace("PROGRAM", program())


def page(primary: Path, tree: Tree) -> str:
    """The page, ready to print; * marks the default option of a group."""
    chosen = default_choices(primary)
    width = max(map(len, tree.groups))
    groups = [line for name in tree.groups for line in _group(name, _options(tree, name, chosen.get(name)), width)]
    keys = [f"  {key:<26} {describe(hint)}" for key, hint in tree.keys.items() if _is_listed(key, hint)]
    keys += [f"  {key:<26} {text}" for key, text in OPEN]
    return "\n".join(
        [
            HEAD,
            "Groups: group=option (* = default)      --help GROUP: their meaning, and that of their keys",
            *groups,
            "",
            "Settings: group.key=value      --help KEY: its meaning and default",
            *keys,
            "",
            TAIL,
        ]
    )


def default_choices(config: Path) -> dict[str, str]:
    """The default option of each group, from the defaults list of the primary file."""
    found = re.findall(r"^\s*- (\w+): (\w+)", config.read_text(encoding="utf-8"), re.MULTILINE)
    return dict(found)


def typed_value(value: object) -> str:
    """The value as it is typed on a command line."""
    return value if isinstance(value, str) else json.dumps(value)


def _group(name: str, options: str, width: int) -> list[str]:
    """The lines of a group, of at most WIDTH characters."""
    first = f"  {name:<{width}}  "
    lines = textwrap.wrap(
        options, WIDTH, initial_indent=first, subsequent_indent=" " * len(first), break_on_hyphens=False
    )
    return lines or [first]


def _options(tree: Tree, name: str, chosen: str | None) -> str:
    return "  ".join(f"{one}*" if one == chosen else one for one in tree.groups[name])


def _is_listed(key: str, hint: Any) -> bool:
    """Whether the page lists the key. A group's option sets its kind, and the architecture's keys are in its file."""
    return get_origin(hint) is not dict and not key.startswith(OPEN_KEYS) and not key.endswith(".kind")
