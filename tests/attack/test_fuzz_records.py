"""Whatever the damage to the records of an output folder, every verb answers and no file in the folder is lost."""

from __future__ import annotations

import json
import random
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import odd
import odd_yaml
import pytest
from ended_output import FILES, Scene
from harness.attack_counts import Tally
from harness.corruptions import CORRUPTIONS
from trials import Trial, Wrong, attack, numbers
from typed import Typist

DOOR = "records"
VERBS = (["list"], ["list", "--json"], ["status"], ["status", "--json"], ["report"], ["report", "--json"], ["watch"])
VERBS += (["logs"], ["logs", "last", "stage3", "--rank", "1"], ["watch", "--json"], ["status", "torn"], ["cancel"])
# These repeat the command that sweep.json names, in the folder that it names.
AGAIN = (["resume"], ["retry"], ["retry", "--retry", "error,oom", "--json"])
RECORDS = [name for name in FILES if ".json" in name]
KEYS = ["state", "point", "points", "label", "pid", "started", "time", "do", "event", "attempt", "config", "command"]
KEYS += ["folder", "rank", "message", "result", "throughput", "memory", "checksum", "slots", "loss", "decision", "job"]
KEYS += ["step", "on_cluster", "tracked", "rank_by", "host", "boot", ""]
# Files that verbs write in any case.
WRITTEN = ("report.md", "results.csv", "report.html", "report.png", ".svg")
# Part of the name under which a damaged file is set aside.
KEPT = ".bad"


def reshaped(data: bytes, chance: random.Random) -> bytes:
    """The record, or some of its lines, with other values, keys and shapes."""
    lines = []
    for line in data.splitlines() if b"\n{" in data.strip() else [data]:
        try:
            found = json.loads(line)
        except ValueError:
            return odd.changed(data, chance)
        if isinstance(found, dict) and chance.random() < 0.8:
            found = odd_yaml.reshaped(found, KEYS, chance)
        lines.append(json.dumps(found, ensure_ascii=chance.random() < 0.8, default=str).encode(errors="surrogatepass"))
    return b"\n".join(lines) + b"\n"


def damage(path: Path, scene: Scene, chance: random.Random) -> str:
    """Damages the file and returns a description."""
    what = chance.random()
    if what < 0.5 and path.is_file():
        path.write_bytes(reshaped(path.read_bytes(), chance))
        return f"{path.name} reshaped: {path.read_bytes()[:1500]!r}"
    if what < 0.8 and path.is_file():
        path.write_bytes(odd.changed(path.read_bytes(), chance))
        return f"{path.name} changed: {path.read_bytes()[:1500]!r}"
    if what < 0.85 and path.is_file():
        other = FILES[chance.choice(RECORDS)](scene)
        path.write_bytes(other.read_bytes() if other.is_file() else b"")
        return f"{path.name} as {other.name}"
    name = chance.choice(list(CORRUPTIONS))
    CORRUPTIONS[name](path)
    return f"{path.name}: {name}"


def contents(output: Path) -> dict[str, bytes]:
    """Contents of every regular file, by its path in the folder; files of 16 MiB or more are left out."""
    found = {}
    for path in output.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 24:
            found[str(path.relative_to(output))] = path.read_bytes()
    return found


def lost(before: Mapping[str, bytes], after: Mapping[str, bytes]) -> list[str]:
    """Files whose contents no longer exist under their name or set aside under another."""
    aside = {data for name, data in after.items() if KEPT in name}
    return [
        name
        for name, data in before.items()
        if not name.endswith(WRITTEN) and after.get(name) != data and data not in aside
    ]


@pytest.mark.parametrize("tried", numbers(25, 1000))
def test_every_verb_answers_whatever_the_damage_to_the_records(
    tried: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally
) -> None:
    typist = Typist(tmp_path, monkeypatch)
    scene = Scene(typist.output)

    def case(trial: Trial) -> None:
        chance = trial.chance
        scene.restore()
        names = chance.sample(sorted(FILES), chance.choice((1, 1, 1, 2, 4)))
        done = [damage(FILES[name](scene), scene, chance) for name in names]
        line = list(chance.choice(VERBS if chance.random() < 0.9 else AGAIN))
        trial.shown = f"{shlex.join(line)}\n" + "\n".join(done)
        before = contents(typist.output)
        typist.type(trial, line)
        if chance.random() < 0.3:
            planned: list[Any] = trial.watched(scene.plan, may_write=[typist.output])
            assert len(planned) == len(scene.points)
        if missing := lost(before, contents(typist.output)):
            raise Wrong("changed", f"changed or gone: {missing}")

    attack(DOOR, tried, tally, case)
