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
HEAD = """\
Runs ZeRO training as an experiment: one point, or a sweep with one table at its end.

  python run.py zero=stage2 precision=bf16                                 one point
  python run.py -m zero=stage0,stage1,stage2,stage3 precision=fp32,bf16    a sweep: every combination
  python run.py sweeps=stages                                              a sweep from a file of sweeps/
  python run.py data=text data.path=FILE_OR_FOLDER                         your own text
  torchrun --nproc-per-node 2 run.py zero=stage3                           joins the processes that are there
  python run.py fit model=llama2_7b hardware=a100_80gb                     what fits; no GPU needed
  python run.py export-weights CHECKPOINT OUT --dtype bf16                 a checkpoint as Hugging Face files
  python run.py import ds_config.json                                      a DeepSpeed setup as one of ours
  python run.py export RUN --to deepspeed                                  a point for another stack
  python run.py io-bench FOLDER                                            a drive's speed, offload settings
  python run.py launch --ranks 2 SCRIPT.py ARGUMENTS                       your own script, on ranks here
  python run.py doctor                                                     what this machine has and can run
  python run.py list | status | watch | logs | report | cancel | resume | retry    sweeps, from any terminal
  python run.py compare SWEEP [SWEEP]                                      what became slower or larger
  python run.py ui                                                         the dashboard
  python run.py completion bash                                            tab completion; also zsh, fish
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


def page(primary: Path, tree: Tree) -> str:
    """The page, ready to print; * marks the default option of a group."""
    chosen = default_choices(primary)
    width = max(map(len, tree.groups))
    groups = [line for name in tree.groups for line in _group(name, _options(tree, name, chosen.get(name)), width)]
    keys = [f"  {key:<26} {describe(hint)}" for key, hint in tree.keys.items() if _is_listed(key, hint)]
    keys += [f"  {key:<26} {text}" for key, text in OPEN]
    return "\n".join(
        [
            HEAD.replace("python run.py", program()),
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
