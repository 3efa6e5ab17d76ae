"""Any command line gets a documented exit code and lines that state the reason, and nothing is started."""

from __future__ import annotations

import os
import random
import shlex
from collections.abc import Callable
from functools import cache
from pathlib import Path

import odd
import pytest
from harness.attack_counts import Tally
from trials import Trial, attack, numbers
from typed import POINTS, ROWS, Typist

from orchestrator.compose.arguments import CHOICES, SHORT, SWITCHES, VALUED, VERBS
from orchestrator.compose.settable import Tree, read_tree

DOOR = "command lines"
# Valid lines: changes to them get past the first checks.
RIGHT = [
    ["zero=stage2", "precision=bf16"],
    ["zero=stage1", "optimizer.lr=1e-3", "batch.micro=2", "--json"],
    ["-m", "zero=stage0,stage1", "seed=range(1,4)", "--plan"],
    ["-m", "zero=glob(*)", "precision=choice(fp32,bf16)", "--plan", "--json"],
    ["sweeps=stages", "batch.micro=1,2", "--plan"],
    ["sweeps=offload_ladder", "--plan", "--prune", "off"],
    ["-m", "zero=stage1,stage2", "cluster=slurm", "resources.device=cpu", "resources.ranks=2", "--plan"],
    ["data=text", "data.path=user.txt", "model=gpt2", "model.config.n_layer=2", "+model.config.foo=1"],
    ["model=pretrained", "model.path=weights", "adapter=none", "batch.seq=16"],
    ["zero=stage3", "offload=optimizer_nvme", "checkpoint=sharded", "checkpoint.resume=auto", "output=outputs/a"],
    ["optimizer=torch", "optimizer.name=NAdam", "+optimizer.arguments.momentum_decay=0.1", "scheduler=warmup_cosine"],
    ["experiment=paper_bytes", "--plan"],
    ["--cfg", "job", "zero=stage1", "--package", "zero"],
    ["-m", "zero=stage1,stage2", "--retry", "error,hang", "--fresh", "--detach"],
]
# Hydra's information options; each takes a tenth of a second or more.
SHOWING = [["--info"], ["--info", "defaults"], ["--hydra-help"], ["-sc", "install=bash"], ["--cfg", "all"], ["-h"]]
VERB_WORDS = ["last", "x", "--json", "--output", "outputs", "missing", "-f", "--rank", "0", "--retry", "oom", "--port"]
VERB_WORDS += ["--dtype", "bf16", "--help", "--version", "--js", "--out", "step-00000001"]


@pytest.fixture
def typist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Typist:
    """Runs lines in a folder with files, a pipe, broken links, and folders that are not what their names suggest."""
    found = Typist(tmp_path, monkeypatch)
    Path("user.txt").write_text("some text\n" * 40)
    Path("folder").mkdir()
    Path("loop").symlink_to("loop")
    Path("gone").symlink_to("nowhere")
    os.mkfifo("pipe")
    for folder in ("weights", "step-00000001"):
        Path(folder).mkdir()
        os.mkfifo(Path(folder, "config.json"))
    return found


@cache
def tree() -> Tree:
    return read_tree()


def setting(chance: random.Random) -> str:
    """A setting with a real key and any value, valid or not."""
    known = tree()
    if chance.random() < 0.25:
        group = chance.choice(list(known.groups))
        return f"{group}={chance.choice([*known.groups[group], odd.value(chance)])}"
    key = chance.choice(list(known.keys))
    if chance.random() < 0.6:
        return f"{key}={odd.fitting(known.keys[key], chance)}"
    return f"{chance.choice(('', '', '', '', '+', '++', '~'))}{key}={odd.value(chance)}"


def wrong_word(chance: random.Random) -> str:
    """A word that does not have the form of a setting."""
    known = tree()
    key = chance.choice([*known.groups, *known.keys])
    forms = [
        key,
        f"~{key}",
        f"{key}=",
        f"={key}",
        f"{key}=={key}",
        f"{key}:{key}",
        f"{key}@x=1",
        f"@{key}",
        f"{key} = 1",
    ]
    forms += [f"--{key}", f"-{key}=3", f"{key}.{key}=1", f"hydra.{key}=1", f"hydra/{key}=x", f"{key}[0]=1", f"/{key}=a"]
    forms += ["hydra.run.dir=/", "hydra.searchpath=[file:///]", "hydra/launcher=x", "hydra.sweeper._target_=os.system"]
    forms += [odd.misspelled(key, chance), odd.value(chance), f"{odd.value(chance)}={odd.value(chance)}"]
    return chance.choice(forms)


def flag(chance: random.Random) -> list[str]:
    """A flag, with or without a value, which may be valid or not."""
    name = chance.choice(
        [*SWITCHES[1:4], *SWITCHES[6:], *VALUED, *list(SHORT)[1:5], "--config-path", "--dry-run", "--x"]
    )
    if name in ("--version", "--shell-completion"):
        name = "--json"
    right = CHOICES.get(name, ("config", "folder", "user.txt", "5", "error", "loop", "pipe", str(Path.cwd())))
    words = chance.choice(
        ([name, chance.choice(right)], [name], [f"{name}={odd.value(chance)}"], [name, odd.value(chance)])
    )
    return [odd.misspelled(words[0], chance), *words[1:]] if chance.random() < 0.1 else words


def settings_line(chance: random.Random) -> list[str]:
    """A valid line with some of its words changed or removed, or with others inserted."""
    line = list(chance.choice(RIGHT)) if chance.random() < 0.85 else []
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        place = chance.randrange(len(line) + 1)
        what = chance.random()
        if what < 0.5:
            line.insert(place, setting(chance))
        elif what < 0.65:
            line.insert(place, wrong_word(chance))
        elif what < 0.8:
            line[place:place] = flag(chance)
        elif place < len(line):
            line[place] = odd.misspelled(line[place], chance) if what < 0.93 else ""
    if chance.random() < 0.02:
        line += chance.choice(SHOWING)
    return [*line, "--max-points", str(POINTS)]


def verb_line(chance: random.Random) -> list[str]:
    """A verb and any words. io-bench, which measures a disk, is left out, and the dashboard server has no store."""
    verb = chance.choice([one for one in VERBS if one != "io-bench"])
    words = [chance.choice([*VERB_WORDS, odd.value(chance), odd.value(chance)]) for _ in range(chance.randrange(5))]
    return [verb, *words] if chance.random() < 0.95 else [odd.misspelled(verb, chance), *words]


def can_be_typed(line: list[str]) -> list[str]:
    """The line without NUL characters, which a process cannot be given."""
    return [word.replace("\0", "") for word in line]


MAKERS: list[Callable[[random.Random], list[str]]] = [settings_line] * 6 + [verb_line]


@pytest.mark.parametrize("tried", numbers(30, 1250))
def test_any_command_line_gets_a_documented_answer(tried: list[int], typist: Typist, tally: Tally) -> None:
    def case(trial: Trial) -> None:
        line = can_be_typed(trial.chance.choice(MAKERS)(trial.chance))
        trial.shown = shlex.join(line)
        typist.type(trial, line)
        most = {"fit": ROWS, "choose": 2 * ROWS}.get(line[0], POINTS)  # choose also runs some of its rows
        assert typist.points <= most, f"{typist.points} points were composed"

    attack(DOOR, tried, tally, case)
