"""The Python environment of a point's ranks: whether they can start in it, and the versions of its packages."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from orchestrator import wings
from orchestrator.compose.settable import is_native
from orchestrator.config.schema import RunConfig
from orchestrator.config.strict import Broken
from orchestrator.machine import children
from orchestrator.planning.point import Point, Refused
from orchestrator.planning.rules.cluster import is_slurm
from orchestrator.planning.rules.scene import Scene
from orchestrator.text.extras import install_line
from orchestrator.wings.engines import packages_of
from orchestrator.wings.engines.contract import EngineModule

# The distributions that a rank imports, whatever trains it.
OF_RANKS = ("torch", "transformers", "submitit", "numpy", "safetensors", "psutil", "pyyaml")
OWN_PACKAGES = ("torch",)
ANSWER_S = 60.0  # the first start of an interpreter on a busy network drive takes seconds
THIS = ("engine.python=null",)


class Packages(NamedTuple):
    """versions: by distribution, None if it is not installed. problem: what was found in place of an interpreter that
    runs ranks."""

    versions: dict[str, str | None]
    problem: str = ""


def known(points: Sequence[Point | Refused], scene: Scene) -> list[Point | Refused]:
    """The points with the versions of their engines' packages. Refused are those whose ranks cannot start in their
    environment, and those with settings of an engine that trains no point."""
    kinds = {str(point.config.engine.kind) for point in points if isinstance(point, Point)}
    if any(isinstance(point, Refused) for point in points):
        kinds.update(wings.ENGINES)  # the engine of a refused point is not known
    return [_known(point, kinds, scene) if isinstance(point, Point) else point for point in points]


def _known(point: Point, kinds: set[str], scene: Scene) -> Point | Refused:
    config = point.config
    # Without the settings of other engines, so that the command of the point alone can be typed.
    own = [
        word for word in point.overrides if not is_native(key := _key(word)) or key.split(".")[1] == config.engine.kind
    ]
    if broken := [*_unused(config, kinds), *(_misplaced(config, scene) or _missing(config))]:
        return Refused(point.label, tuple(own), tuple(broken))
    return replace(point, config=with_versions(config), overrides=tuple(own))


def _key(word: str) -> str:
    return word.lstrip("+").partition("=")[0]


def with_versions(config: RunConfig) -> RunConfig:
    """The configuration with the versions of its engine's packages, which are then part of its identity.

    Points of zero-lab's own runtime in this environment get none: `compare` finds what an upgrade of torch changed.
    """
    engine = config.engine
    if engine.is_own and engine.python is None:
        return config
    found = packages_in(engine.python, _names(config)).versions
    return replace(config, engine=replace(engine, versions={name: found[name] for name in _of_engine(config)}))


def packages_in(python: str | None, names: tuple[str, ...]) -> Packages:
    """The versions of these distributions in the environment of an interpreter; None: in that of this process."""
    return Packages(packages_of.versions(names)) if python is None else _asked(python, names)


def _of_engine(config: RunConfig) -> tuple[str, ...]:
    """The distributions whose versions are part of the row."""
    own = () if config.engine.is_own else _module(config).PACKAGES
    return tuple(dict.fromkeys((*own, *OWN_PACKAGES)))


def _names(config: RunConfig) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*OF_RANKS, *_of_engine(config))))


def _module(config: RunConfig) -> EngineModule:
    found: EngineModule = wings.load(wings.ENGINES[config.engine.kind])
    return found


def _unused(config: RunConfig, kinds: set[str]) -> list[Broken]:
    """Settings of engines that train no point: who gives one believes that it does something."""
    given = [kind for kind in wings.ENGINES if kind not in kinds and getattr(config.engine, kind, None)]
    found = f"engine={config.engine.kind}"
    return [Broken(f"engine.{kind} changes nothing but points of engine={kind}", found, (f"engine={kind}",))
            for kind in given]  # fmt: skip


def _misplaced(config: RunConfig, scene: Scene) -> list[Broken]:
    """Why no rank can be started by the interpreter."""
    python = config.engine.python
    if python is None:
        return []
    if scene.world is not None or is_slurm(config.cluster):
        rule = "engine.python is for ranks that this command starts on this machine, not for those of SLURM or torchrun"
        return [Broken(rule, python, THIS)]
    if problem := packages_in(python, _names(config)).problem:
        rule = "engine.python must be the interpreter of a virtual environment"
        return [Broken(rule, problem, (*_inside(Path(python)), *THIS))]
    return []


def _inside(folder: Path) -> tuple[str, ...]:
    """The fix where the folder of the environment is given."""
    return (f"engine.python={folder / 'bin/python'}",) if (folder / "bin" / "python").exists() else ()


def _missing(config: RunConfig) -> list[Broken]:
    """The packages that the ranks import and that are not in their environment."""
    python, versions = config.engine.python, packages_in(config.engine.python, _names(config)).versions
    found = f"no such package with {python or 'this Python'}"
    pip = f"{python} -m pip install" if python else "pip install"
    of_rank = [name for name in OF_RANKS if versions[name] is None] if python else []
    broken = []
    if of_rank:
        rule = f"the ranks of engine.python need {', '.join(of_rank)}: {pip} {' '.join(of_rank)}"
        broken.append(Broken(rule, found, THIS))
    if not config.engine.is_own and (module := _module(config)).EXTRA and versions[first := module.PACKAGES[0]] is None:
        # Ranks of another interpreter have zero-lab's code from here, and need only the engine there.
        line = f"{pip} '{first}'" if python else install_line(module.EXTRA)
        rule = f"engine={config.engine.kind} needs the package {first}: {line}"
        broken.append(Broken(rule, found, ("engine=zero",)))
    return broken


@cache
def _asked(python: str, names: tuple[str, ...]) -> Packages:
    """What the interpreter itself says, asked as its ranks are started: with the same variables."""
    none: dict[str, str | None] = dict.fromkeys(names)
    if not Path(python).is_file():
        return Packages(none, f"{python}, which is {'a folder' if Path(python).is_dir() else 'not there'}")
    try:
        answer = subprocess.run(
            [python, str(Path(packages_of.__file__)), *names],
            env=children.environment(os.environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=ANSWER_S,
        )
        told = json.loads(answer.stdout)
        version = ".".join(map(str, told["python"]))
    except subprocess.TimeoutExpired:
        return Packages(none, f"{python}, which does not answer within {ANSWER_S:g} s")
    except (OSError, ValueError, KeyError, TypeError):
        return Packages(none, f"{python}, which runs no Python")
    if not told["packages"]:
        return Packages(none, f"{python}, which is Python {version}: expected 3.10 or newer")
    return Packages(told["packages"])
