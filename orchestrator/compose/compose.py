"""Composes the points of a command line with Hydra, and passes Hydra's own flags on to it.

Only this file and overrides.py import Hydra.
"""

from __future__ import annotations

import builtins
import contextlib
import copy
import io
import itertools
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import hydra
import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType, RangeSweep
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, OverrideParseException
from hydra.initialize import get_gh_backup, restore_gh_from_backup
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from orchestrator.compose import folders, merge, overrides, point_count, sweep_file
from orchestrator.compose.arguments import Arguments
from orchestrator.compose.composition import Composed, Composition
from orchestrator.compose.merge import Merger
from orchestrator.compose.settable import Tree, for_hydra, read_tree, with_all_keys
from orchestrator.compose.sweep_file import Line, SweepFile
from orchestrator.text.streams import complain

# Hydra 1.3 must be told to behave as 1.3, and 1.4 not. OmegaConf 2.4, which comes with 1.4, reads no more than 10,000
# values unless it is told otherwise, and a sweep's file may list 10,000 points.
_IS_1_3 = hydra.__version__.startswith("1.3.")
BASE: dict[str, Any] = {"version_base": "1.3"} if _IS_1_3 else {}
UNBOUNDED: dict[str, Any] = {} if _IS_1_3 else {"max_yaml_expanded_nodes": None}


class ComposeError(ValueError):
    """The command line cannot be composed; the message is one line."""


_changing: set[str] = set()  # files that lists of defaults name after the first; Hydra reads the lists before them


class OwnSource(FileConfigSource):
    """A configuration folder. Its files get the keys of their group that they leave out: Hydra then accepts overrides
    of these."""

    @staticmethod
    def scheme() -> str:
        return "own"

    def is_config(self, config_path: str) -> bool:
        is_shipped = Path(self.path) == folders.CONF
        return super().is_config(config_path) and (is_shipped or config_path != folders.PRIMARY)

    def load_config(self, config_path: str) -> ConfigResult:
        try:
            loaded = super().load_config(config_path)
        except (ValueError, OSError, AssertionError, RecursionError):
            read_yaml(Path(self.path) / f"{config_path.removesuffix('.yaml')}.yaml")  # its errors name the file
            raise
        if not isinstance(loaded.config, DictConfig) or loaded.header["package"] is not None:
            return loaded  # a file with a package sets keys of other groups
        values: Any = OmegaConf.to_container(loaded.config, resolve=False)
        if "defaults" in values:
            # Its keys come from the first file of the list; the others change some of these.
            entries = values["defaults"] if isinstance(values["defaults"], list) else []  # Hydra reports anything else
            files = [entry for entry in entries if isinstance(entry, str) and entry != "_self_"]
            _changing.update(f"{config_path.rpartition('/')[0]}/{file}" for file in files[1:])
        elif config_path not in _changing:
            loaded.config = OmegaConf.create(with_all_keys(config_path, values))
        return loaded


class SweepsSource(OwnSource):
    """Shows Hydra the folder sweeps/ of a folder that may hold other things, and nothing else in it.

    A group is a folder inside an entry of the search path, so the parent of sweeps/ must be on the path. But for
    --hydra-help and completion Hydra walks every folder below an entry, which takes a minute for .venv alone.
    """

    @staticmethod
    def scheme() -> str:
        return "sweeps"

    def list(self, config_path: str, results_filter: ObjectType | None) -> builtins.list[str]:
        return super().list(config_path, results_filter) if config_path else ["sweeps"]


class OurFolders(SearchPathPlugin):
    """Has conf/ read by OwnSource, and adds the user's own folders before it and those with sweeps/ to Hydra's search
    path. `added`: the folder of --config-dir of the line that is composed."""

    added: str | None = None

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        shipped = f"{OwnSource.scheme()}://{folders.CONF}"
        for place in search_path.get_path():
            if place.path == str(folders.CONF):
                place.path = shipped
        for folder in folders.own_folders(self.added):
            search_path.prepend("zero-lab", f"{OwnSource.scheme()}://{folder}", SearchPathQuery(None, shipped))
        for folder in folders.sweep_parents(self.added):
            search_path.append("zero-lab", f"{SweepsSource.scheme()}://{folder}")


Plugins.instance().register(OwnSource)
Plugins.instance().register(SweepsSource)
Plugins.instance().register(OurFolders)


def compose(arguments: Arguments) -> Composition:
    """All points, before their values are checked. ComposeError if Hydra or the sweep file reports a problem."""
    name = arguments.flags.get("--config-name") or "config"
    try:
        with _our_hydra(arguments) as loader:
            found = _expansion(loader, name, arguments)
            composer = Composer(loader, name, arguments)
            points = tuple(composer.point(list(line.values())) for line in found.lines)
    except RecursionError as error:
        raise ComposeError("a value is nested too deep: expected fewer than a hundred levels") from error
    except (
        *(HydraException, OmegaConfBaseException, yaml.YAMLError),
        *(ValueError, ArithmeticError, OSError, AssertionError),  # ArithmeticError: range(nan,1)
    ) as error:
        raise ComposeError(in_one_line(error)) from error
    return Composition(points, found.is_sweep, found.axes, found.sweep)


@contextlib.contextmanager
def _our_hydra(arguments: Arguments) -> Iterator[ConfigLoader]:
    """Hydra, initialized with our folders. Afterwards restores the state of a Hydra application that calls us."""
    around = get_gh_backup()
    GlobalHydra.instance().clear()
    OurFolders.added = arguments.flags.get("--config-dir")
    try:
        with hydra.initialize_config_dir(config_dir=str(folders.CONF), job_name="run", **BASE):
            yield GlobalHydra.instance().config_loader()
    finally:
        restore_gh_from_backup(around)


class _Lines(NamedTuple):
    lines: Sequence[Line]
    axes: tuple[str, ...]
    is_sweep: bool
    sweep: SweepFile


def _expansion(loader: ConfigLoader, name: str, arguments: Arguments) -> _Lines:
    """One line of overrides per point, from a declared sweep or from Hydra's own grammar."""
    words = arguments.overrides
    tree = read_tree(arguments.flags.get("--config-dir"))
    declared = _declared_sweep(arguments)
    if declared is not None:
        parsed = _parsed(loader, [word for word in words if not word.startswith("sweeps=")])
        typed = {key: _values(one, arguments.max_points) for key, one in parsed.items()}
        expansion = sweep_file.expand(declared, typed, arguments.max_points)
        if not expansion.lines:
            raise HydraException("the sweep has no points: exclude leaves none")
        said = list(dict.fromkeys(word for line in expansion.lines for word in line.values()))
        _check_file(said, tree)
        for where, pattern in sweep_file.patterns(declared):
            _check_file(pattern, tree, f"{where}: ")
        return _Lines(expansion.lines, expansion.axes, True, declared)
    params: Mapping[Any, Any] = {}
    is_sweep = arguments.multirun
    # Only these files can turn a run into a sweep. Reading them costs one more composition.
    if any(word.lstrip("+").startswith(("sweeps=", "experiment=")) for word in words) or name != "config":
        master = loader.load_configuration(name, [*map(for_hydra, words)], run_mode=RunMode.MULTIRUN)
        is_sweep = is_sweep or OmegaConf.select(master, "hydra.mode") == RunMode.MULTIRUN
        params = (OmegaConf.select(master, "hydra.sweeper.params") or {}) if is_sweep else {}
    said = [f"{key}={value}" for key, value in params.items()]
    _check_file(said, tree)
    parsed = _parsed(loader, [*said, *words])
    axes = {key: _values(one, arguments.max_points) for key, one in parsed.items()}
    point_count.check([(key, len(values)) for key, values in axes.items()], arguments.max_points)
    _need_a_sweep(axes, is_sweep)
    lines = [dict(zip(axes, line, strict=True)) for line in itertools.product(*axes.values())]
    return _Lines(lines, tuple(key for key, values in axes.items() if len(values) > 1), is_sweep, SweepFile())


def _check_file(words: Sequence[str], tree: Tree, where: str = "") -> None:
    """Checks overrides from a file as `overrides.check` checks those of the command line, with the same hints."""
    if problems := overrides.check(words, tree, multirun=True):
        raise HydraException("; ".join(f"{where}{problem}" for problem in problems))


def _declared_sweep(arguments: Arguments) -> SweepFile | None:
    """The sweep file chosen by sweeps=NAME; None if there is none, or if it is in Hydra's own form."""
    names = [word.removeprefix("sweeps=") for word in arguments.overrides if word.startswith("sweeps=")]
    path = folders.find_sweep(names[-1], arguments.flags.get("--config-dir")) if names else None
    return sweep_file.read(path, read_yaml) if path is not None else None


class _ByHydra(NamedTuple):
    """A configuration composed by Hydra; `interpolates` is True if it contains interpolations of other values."""

    values: dict[str, Any]
    choices: dict[str, str | None]
    interpolates: bool


class Composer:
    """Turns lines of overrides into points: by merging option files if that is sufficient, else with Hydra.

    Hydra composes each set of options once; the other settings of a line are then applied to a copy.
    """

    def __init__(self, loader: ConfigLoader, name: str, arguments: Arguments) -> None:
        self._loader, self._name = loader, name
        self._merger = Merger(folders.config_folders(arguments.flags.get("--config-dir")), name, read_yaml)
        self._flags = arguments.folders()
        self._parser = OverridesParser.create(config_loader=loader)
        self._parsed: dict[str, Override] = {}
        self._composed: dict[tuple[str, ...], _ByHydra] = {}

    def point(self, line: list[str]) -> Composed:
        """The point of one line of overrides, each with a single value."""
        # The sweep file belongs to the command line and is not part of a single point.
        kept = (*self._flags, *(word for word in line if not word.startswith("sweeps=")))
        overrides = [self._parse(word) for word in line]
        choices = [one for one in overrides if one.key_or_group in self._merger.groups]
        # Plain changes only: Hydra has to handle additions, deletions and packages.
        settings = [
            (one.key_or_group, one.value())
            for one in overrides
            if one not in choices and one.type is OverrideType.CHANGE and one.package is None
        ]
        if len(choices) + len(settings) == len(overrides) and all(type(one.value()) is str for one in choices):
            chosen = {one.key_or_group: str(one.value()) for one in choices}
            values = self._merger.merge(chosen, settings)
            if values is not None:
                return Composed(values, {**self._merger.groups, **chosen}, kept)
            found = self._by_hydra(tuple(one.input_line or "" for one in choices))
            values = copy.deepcopy(found.values)
            # Hydra must resolve interpolations with the settings already applied.
            if not found.interpolates and merge.apply(values, settings):
                return Composed(values, found.choices, kept)
        found = self._by_hydra(tuple(line))
        return Composed(found.values, found.choices, kept)

    def _parse(self, word: str) -> Override:
        if word not in self._parsed:
            self._parsed[word] = self._parser.parse_override(word)
        return self._parsed[word]

    def _by_hydra(self, words: tuple[str, ...]) -> _ByHydra:
        if words not in self._composed:
            config = self._loader.load_configuration(self._name, [*map(for_hydra, words)], run_mode=RunMode.RUN)
            choices = {str(group): option for group, option in config.hydra.runtime.choices.items()}
            OmegaConf.set_struct(config, False)
            del config["hydra"]
            resolved = OmegaConf.to_container(config, resolve=True)
            assert isinstance(resolved, dict)
            values = {str(key): value for key, value in resolved.items()}
            self._composed[words] = _ByHydra(values, choices, "${" in OmegaConf.to_yaml(config))
        return self._composed[words]


def show(arguments: Arguments) -> NoReturn:
    """Lets Hydra answer --cfg, --info, --hydra-help and --shell-completion, then exits the process.

    Raises ComposeError with Hydra's message if Hydra fails.
    """
    with contextlib.redirect_stderr(io.StringIO()) as told:
        code = hand_over(arguments)
    lines = [line.strip() for line in told.getvalue().splitlines() if "HYDRA_FULL_ERROR" not in line]
    if code:
        raise ComposeError(" ".join(filter(None, lines)).removeprefix("error: "))
    sys.stderr.write(told.getvalue())
    raise SystemExit(0)


def hand_over(arguments: Arguments) -> int:
    """Run hydra.main on our configuration with Hydra's own flags, and return its exit code."""
    sys.argv[1:] = map(for_hydra, arguments.for_hydra())
    OurFolders.added = arguments.flags.get("--config-dir")

    @hydra.main(config_path=str(folders.CONF), config_name="config", **BASE)
    def nothing(config: DictConfig) -> None:
        """Never called: the flag only shows something."""

    try:
        nothing()
    except SystemExit as end:
        return 1 if end.code else 0
    except (HydraException, OmegaConfBaseException) as error:
        complain(f"error: {in_one_line(error)}")
        return 1
    return 0


def in_one_line(error: BaseException) -> str:
    """The error's message in one line, without Hydra's advice to add keys, which nothing here would read."""
    if isinstance(error, OverrideParseException):
        return overrides.unreadable(error.override, error)
    lines = [line.strip() for line in str(error).splitlines() if "HYDRA_FULL_ERROR" not in line]
    text = "\n".join(filter(None, lines))
    cause = error.__cause__
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return sweep_file.yaml_problem(error)
    if taken := re.search(r"An item is already at '(.+)'", text):
        return f"+{taken[1]}: it is already there, so write {taken[1]}=VALUE without the +"
    if unknown := re.search(r"Could not override '(.+)'", text):
        return f"'{unknown[1]}' is not a setting of the options chosen"
    if isinstance(cause, OmegaConfBaseException):
        text = f"{text} {cause}"
    kept = [line.strip() for line in text.splitlines() if line.strip()]
    search = next((at for at, line in enumerate(kept) if line.startswith("Config search path")), len(kept))
    return " ".join(kept[:search])


def _parsed(loader: ConfigLoader, words: Sequence[str]) -> dict[str, Override]:
    """The overrides by key; if a key occurs twice, the last one wins."""
    parsed = OverridesParser.create(config_loader=loader).parse_overrides(list(words))
    return {override.get_key_element(): override for override in parsed}


def _need_a_sweep(axes: dict[str, list[str]], is_sweep: bool) -> None:
    lists = [key for key, values in axes.items() if len(values) > 1]
    if lists and not is_sweep:
        raise HydraException(f"a list of values for {' and '.join(lists)} needs -m (sweep)")


def _values(override: Override, limit: int) -> list[str]:
    """The override with each of its values, of which a range may have as many as a sweep may have points."""
    key = override.get_key_element()
    if not override.is_sweep_override():
        return [override.input_line or ""]
    if not override.is_discrete_sweep():
        raise HydraException(f"{override.input_line}: an interval has no end of values; use range() or choice()")
    value = override.value()
    # Looked at before Hydra lists or shuffles them: they may be more than memory holds.
    if isinstance(value, RangeSweep) and len(list(itertools.islice(value.range(), limit + 1))) > limit:
        raise point_count.too_many(limit, f"more in {override.input_line}")
    typed = {"True": "true", "False": "false"}  # Hydra spells them as Python does
    values = [f"{key}={typed.get(value, value)}" for value in override.sweep_string_iterator()]
    if not values:
        why = (
            "glob() picks options of a group by name" if "glob(" in (override.input_line or "") else "the list is empty"
        )
        raise HydraException(f"{override.input_line}: expected at least one value, found none: {why}")
    return values


def read_yaml(path: Path) -> Any:
    """The plain data of a file, read as Hydra does: 1e-3 is a number, and a duplicate key is an error.

    Raises ValueError, or PyYAML's own error, for a file that is not a mapping of settings.
    """
    where = f"{path.parent.name}/{path.name}"
    if path.exists() and not path.is_file():  # reading a pipe may never end
        raise ValueError(f"{where}: expected a file of settings, found {'a folder' if path.is_dir() else 'no file'}")
    try:
        return OmegaConf.to_container(OmegaConf.load(path, **UNBOUNDED))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where}: expected text in UTF-8, found the byte 0x{error.object[error.start]:02x}; save it as UTF-8"
        ) from None
    except RecursionError:
        raise ValueError(f"{where}: {sweep_file.TOO_DEEP}") from None
    except (OSError, AssertionError) as error:
        found = getattr(error, "strerror", None) or "a single value"
        raise ValueError(f"{where}: expected a mapping of settings, found {found}; write 'key: value' lines") from None
