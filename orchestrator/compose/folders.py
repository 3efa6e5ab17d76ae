"""Where configuration is looked for: what ships with the project, then the user's own folders, then --config-dir."""

from __future__ import annotations

from pathlib import Path

from orchestrator.text.paths import CODE

_PACKAGE = CODE / "orchestrator"
# An installed package carries both folders inside; a checkout has them beside.
SHIPPED = CODE if (CODE / "conf").is_dir() else _PACKAGE / "shipped"
CONF = SHIPPED / "conf"
# Holds Hydra's namespace of plugins in a checkout; an installed package has ours among its site-packages.
PLUGINS = _PACKAGE / "plugins"


def config_folders(added: str | None) -> list[Path]:
    """Folders of option groups; where two have one option, the first has it."""
    own = Path.cwd() / "conf"
    found = [CONF, *([own] if own.is_dir() and own.resolve() != CONF.resolve() else [])]
    return found + ([Path(added).absolute()] if added else [])


def sweep_parents(added: str | None) -> list[Path]:
    """Folders that may have a folder sweeps/."""
    found = [SHIPPED]
    if (Path.cwd() / "sweeps").is_dir() and Path.cwd().resolve() != SHIPPED.resolve():
        found.append(Path.cwd())
    return found + ([Path(added).absolute()] if added else [])


def find_sweep(name: str, added: str | None) -> Path | None:
    """The file of a sweep; None where there is none of that name."""
    for folder in sweep_parents(added):
        path = folder / "sweeps" / f"{name.removesuffix('.yaml')}.yaml"
        if path.is_file():
            return path
    return None
