"""What trackers may leave undone: a file for each, in the output folder, from its start until MLflow has everything.

It names the sweep or the attempt, and its own name has the mark of the command. Once that has ended, the next command
completes what is left from the records.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from orchestrator.records.record_file import clear_leftovers, read_or_warn, write_json_atomic
from orchestrator.records.record_shapes import LEFT
from orchestrator.records.run_record import tracking_path
from zero_runtime.process_identity import has_ended, mark

TRIES = 3  # to complete it; then it is left to the verb sync


def note(output: Path, root: Path) -> None:
    """Notes that a tracker of this process begins with the sweep or attempt."""
    with suppress(OSError):  # it will not be completed by itself if it is cut off
        tracking_path(output).mkdir(mode=0o700, parents=True, exist_ok=True)
        name = f"{mark()}.{hashlib.sha256(str(root).encode()).hexdigest()[:8]}"
        write_json_atomic(tracking_path(output) / name, {"of": str(root), "tries": 0})


def forget(output: Path, root: Path) -> None:
    """MLflow has everything of the sweep or attempt."""
    name = hashlib.sha256(str(root).encode()).hexdigest()[:8]
    for path in tracking_path(output).glob(f"*.{name}"):
        path.unlink(missing_ok=True)


def behind(output: Path) -> list[Path]:
    """The files of commands on this machine that have ended."""
    clear_leftovers(tracking_path(output))
    return [path for path in _all(output) if has_ended(path.name)]


def followed(output: Path) -> set[Path]:
    """The sweeps and attempts of commands that may still run."""
    return {_root(path) for path in _all(output) if not has_ended(path.name)}


def _all(output: Path) -> list[Path]:
    folder = tracking_path(output)
    return [path for path in sorted(folder.glob("*")) if path.suffix not in (".tmp", ".json")]


def take(path: Path) -> Path | None:
    """The root in the file, of which one more try is counted; None, and it is removed, if there were enough."""
    facts = read_or_warn(path, LEFT)
    if facts is None or facts["tries"] >= TRIES:
        path.unlink(missing_ok=True)
        return None
    write_json_atomic(path, {**facts, "tries": facts["tries"] + 1})
    return Path(facts["of"])


def _root(path: Path) -> Path:
    return Path((read_or_warn(path, LEFT) or {"of": "."})["of"])
