"""The only importer of Hydra: composes the points of a command line, and hands Hydra's own flags to Hydra."""

from __future__ import annotations

import builtins
import itertools
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import hydra
import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from orchestrator.arguments import Arguments

ROOT = Path(__file__).resolve().parents[1]
VERSION_BASE = "1.3"


class ComposeError(ValueError):
    """What Hydra could not read or put together, in one line."""


class SweepsSource(FileConfigSource):
    """Shows Hydra the folder sweeps/ of the project's root, and nothing beside it.

    A group is a folder on the search path, so the root must be on it for sweeps/ to be one. But Hydra walks every
    folder below for --hydra-help and completion: .venv alone takes it a minute.
    """

    @staticmethod
    def scheme() -> str:
        return "sweeps"

    def list(self, config_path: str, results_filter: ObjectType | None) -> builtins.list[str]:
        return super().list(config_path, results_filter) if config_path else ["sweeps"]


class SweepsFolder(SearchPathPlugin):
    """Puts the folder sweeps/ on the search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="zero-lab", path=f"{SweepsSource.scheme()}://{ROOT}")


Plugins.instance().register(SweepsSource)
Plugins.instance().register(SweepsFolder)


@dataclass(frozen=True)
class Composed:
    """One point as plain data, the option chosen in each group, and the overrides that made it."""

    values: dict[str, Any]
    choices: dict[str, str | None]
    overrides: tuple[str, ...]


@dataclass(frozen=True)
class Composition:
    """The points of a command line. `axes` are the keys with more than one value, in the order of the sweep."""

    points: tuple[Composed, ...]
    is_sweep: bool
    axes: tuple[str, ...]


def compose(arguments: Arguments) -> Composition:
    """All the points, their values not yet judged. ComposeError when Hydra refuses."""
    name = arguments.flags.get("--config-name") or "config"
    searchpath = _added_folder(arguments)
    try:
        with hydra.initialize_config_dir(version_base=VERSION_BASE, config_dir=str(ROOT / "conf"), job_name="run"):
            loader = GlobalHydra.instance().config_loader()
            master = loader.load_configuration(name, searchpath + arguments.overrides, run_mode=RunMode.MULTIRUN)
            is_sweep = arguments.multirun or OmegaConf.select(master, "hydra.mode") == RunMode.MULTIRUN
            axes = _axes(loader, master, arguments.overrides, is_sweep)
            _need_a_sweep(axes, is_sweep)
            lines = [list(line) for line in itertools.product(*axes.values())]
            points = [_point(loader, name, searchpath, line) for line in lines]
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        raise ComposeError(in_one_line(error)) from error
    varying = tuple(key for key, values in axes.items() if len(values) > 1)
    return Composition(tuple(points), is_sweep, varying)


def show(arguments: Arguments) -> NoReturn:
    """Hydra answers --cfg, --info, --hydra-help, --shell-completion and --version, and the process ends."""
    sys.argv[1:] = arguments.for_hydra()

    @hydra.main(version_base=VERSION_BASE, config_path=str(ROOT / "conf"), config_name="config")
    def nothing(config: DictConfig) -> None:
        """Never called: each of these flags shows something instead."""

    try:
        nothing()
    except SystemExit as end:
        raise SystemExit(2 if end.code else 0) from None
    raise SystemExit(0)


def in_one_line(error: BaseException) -> str:
    """The message without Hydra's advice, which is about adding keys that nothing here would read."""
    text = str(error).strip()
    cause = error.__cause__
    if taken := re.search(r"An item is already at '(.+)'", text):
        return f"+{taken[1]}: it is already there, so write {taken[1]}=VALUE without the +"
    if unknown := re.search(r"Could not override '(.+)'", text):
        return f"'{unknown[1]}' is not a setting of the options chosen"
    if isinstance(cause, OmegaConfBaseException):
        text = f"{text} {cause}"
    kept = [line.strip() for line in text.splitlines() if line.strip() and "HYDRA_FULL_ERROR" not in line]
    search = next((at for at, line in enumerate(kept) if line.startswith("Config search path")), len(kept))
    return " ".join(kept[:search])


def _axes(loader: ConfigLoader, master: DictConfig, words: Sequence[str], is_sweep: bool) -> dict[str, list[str]]:
    """For each key its overrides, one for each value; the command line wins over the params of a sweep file."""
    params = OmegaConf.select(master, "hydra.sweeper.params") or {}
    lines = [f"{key}={value}" for key, value in params.items()] if is_sweep else []
    parsed = OverridesParser.create(config_loader=loader).parse_overrides([*lines, *words])
    axes: dict[str, list[str]] = {}
    for override in parsed:
        axes[override.get_key_element()] = _values(override)
    return axes


def _need_a_sweep(axes: dict[str, list[str]], is_sweep: bool) -> None:
    lists = [key for key, values in axes.items() if len(values) > 1]
    if lists and not is_sweep:
        raise HydraException(f"a list of values for {' and '.join(lists)} needs -m (sweep)")


def _values(override: Override) -> list[str]:
    key = override.get_key_element()
    if not override.is_sweep_override():
        return [override.input_line or ""]
    if not override.is_discrete_sweep():
        raise HydraException(f"{override.input_line}: an interval has no end of values; use range() or choice()")
    return [f"{key}={value}" for value in override.sweep_string_iterator()]


def _point(loader: ConfigLoader, name: str, searchpath: list[str], line: list[str]) -> Composed:
    config = loader.load_configuration(name, searchpath + line, run_mode=RunMode.RUN)
    choices = {str(group): option for group, option in config.hydra.runtime.choices.items()}
    OmegaConf.set_struct(config, False)
    del config["hydra"]
    values = OmegaConf.to_container(config, resolve=True)
    assert isinstance(values, dict)
    # The chosen sweep file is part of how the line was typed, not of what one point is.
    kept = tuple(word for word in line if not word.startswith("sweeps="))
    return Composed({str(key): value for key, value in values.items()}, choices, kept)


def _added_folder(arguments: Arguments) -> list[str]:
    folder = arguments.flags.get("--config-dir")
    return [f'hydra.searchpath=["file://{Path(folder).absolute()}"]'] if folder else []
