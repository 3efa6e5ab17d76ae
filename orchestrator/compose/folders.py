"""The folders with configuration: --config-dir, then the current folder's, then those that ship with the project."""

from __future__ import annotations

import filecmp
from collections.abc import Sequence
from pathlib import Path

from orchestrator.text.paths import CODE

_PACKAGE = CODE / "orchestrator"
# conf/ and sweeps/ are next to the package in a checkout, and inside it when it is installed.
SHIPPED = CODE if (CODE / "conf").is_dir() else _PACKAGE / "shipped"
CONF = SHIPPED / "conf"
PRIMARY = "config"  # the file with the defaults: always the shipped one, since projects of others have one too


def own_folders(added: str | None) -> list[Path]:
    """The user's own folders of option groups. `added`: the folder of --config-dir."""
    return _own(added, Path.cwd() / "conf", CONF)


def config_folders(added: str | None) -> list[Path]:
    """Folders of option groups; if several have the same option, the first one is used."""
    return [*own_folders(added), CONF]


def sweep_parents(added: str | None) -> list[Path]:
    """Folders that may contain a folder sweeps/; if several have the same sweep, the first one is used."""
    here = Path.cwd()
    own = _own(added, here, SHIPPED)
    return [*(one for one in own if one != here or (here / "sweeps").is_dir()), SHIPPED]


def _own(added: str | None, here: Path, shipped: Path) -> list[Path]:
    found = [*([Path(added).absolute()] if added else []), *([here] if here.is_dir() else [])]
    return [folder for folder in dict.fromkeys(found) if folder.resolve() != shipped.resolve()]


def option_file(name: str, folders: Sequence[Path]) -> Path | None:
    """The file of an option such as `zero/stage2`, in the first folder that has it; None if there is none."""
    searched = folders[-1:] if name == PRIMARY else folders
    return next((file for folder in searched if (file := folder / f"{name}.yaml").is_file()), None)


def find_sweep(name: str, added: str | None) -> Path | None:
    """The file of the sweep with this name; None if there is none."""
    return option_file(f"sweeps/{name.removesuffix('.yaml')}", sweep_parents(added))


def replacing(added: str | None) -> list[Path]:
    """The user's files that are used in place of one with the same name and other content."""
    found = []
    for folders, pattern in ((config_folders(added), "*/*.yaml"), (sweep_parents(added), "sweeps/*.yaml")):
        used: dict[Path, Path] = {}
        for folder in folders:
            for file in sorted(folder.glob(pattern)):
                first = used.setdefault(file.relative_to(folder), file)
                if first is not file and not _is_same(first, file):
                    found.append(first)
    return list(dict.fromkeys(found))


def _is_same(first: Path, second: Path) -> bool:
    try:
        return filecmp.cmp(first, second, shallow=False)
    except OSError:
        return False  # reading it for a point reports the problem
