"""The folders with configuration: those that ship with the project, then the user's own, then --config-dir."""

from __future__ import annotations

from pathlib import Path

from orchestrator.text.paths import CODE

_PACKAGE = CODE / "orchestrator"
# conf/ and sweeps/ are next to the package in a checkout, and inside it when it is installed.
SHIPPED = CODE if (CODE / "conf").is_dir() else _PACKAGE / "shipped"
CONF = SHIPPED / "conf"
# Contains Hydra's plugin namespace in a checkout; an installed package has our plugin in site-packages. The folder has
# no other content, because it is put on sys.path, where all of its content can be imported.
PLUGINS = _PACKAGE / "plugins"


def config_folders(added: str | None) -> list[Path]:
    """Folders of option groups; if two have the same option, the first one is used."""
    own = Path.cwd() / "conf"
    found = [CONF, *([own] if own.is_dir() and own.resolve() != CONF.resolve() else [])]
    return found + ([Path(added).absolute()] if added else [])


def sweep_parents(added: str | None) -> list[Path]:
    """Folders that may contain a folder sweeps/."""
    found = [SHIPPED]
    if (Path.cwd() / "sweeps").is_dir() and Path.cwd().resolve() != SHIPPED.resolve():
        found.append(Path.cwd())
    return found + ([Path(added).absolute()] if added else [])


def find_sweep(name: str, added: str | None) -> Path | None:
    """The file of the sweep with this name; None if there is none."""
    for folder in sweep_parents(added):
        path = folder / "sweeps" / f"{name.removesuffix('.yaml')}.yaml"
        if path.is_file():
            return path
    return None
