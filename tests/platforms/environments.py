"""Virtual environments of another Python or other packages, for the variations of run.py; kept in .venv between runs.

An environment of the Python that runs this uses the packages that are installed there, below its own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / ".venv" / "environments"  # `make clean` removes it
LIMIT_S = 1200.0
HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"
MADE = "made.json"  # what the environment was made from; written last


def environment(name: str, python: str, *requirements: str) -> Path | str:
    """The interpreter of the environment `name`, which is made first if need be; else the reason why there is none.

    python: "3.10". requirements: words for `pip install`, options too.
    """
    place = FOLDER / name
    made = place / MADE
    if is_made(name, python, *requirements):
        return place / "bin" / "python"
    base = interpreter(python)
    if base is None:
        return f"no python{python} on the PATH"
    shutil.rmtree(place, ignore_errors=True)
    own = place / "bin" / "python"
    problem = _problem(str(base), "-m", "venv", str(place))
    if problem is None and python == HERE:
        shared = [folder for folder in sys.path if folder.endswith("site-packages")]
        (site,) = place.glob("lib/python*/site-packages")
        (site / "shared.pth").write_text("\n".join(shared) + "\n")
    if problem is None and requirements:
        problem = _problem(str(own), "-m", "pip", "install", "--quiet", *requirements)
    if problem is not None:
        shutil.rmtree(place, ignore_errors=True)
        return problem
    made.write_text(json.dumps([python, *requirements]))
    return own


def is_made(name: str, python: str, *requirements: str) -> bool:
    """Whether the environment is there, made from the same words, so that it costs nothing to use."""
    made = FOLDER / name / MADE
    return made.is_file() and made.read_text() == json.dumps([python, *requirements])


def interpreter(python: str) -> Path | None:
    """The program of that version; pyenv's shims are asked for it by their own setting."""
    if python == HERE:
        return Path(sys.executable)
    program = shutil.which(f"python{python}")
    if program is None:
        return None
    asked = [program, "-c", "import sys; print(sys.executable)"]
    done = subprocess.run(asked, env={**os.environ, "PYENV_VERSION": python}, capture_output=True, text=True)
    return Path(done.stdout.strip()) if done.returncode == 0 else None


def _problem(*command: str) -> str | None:
    """The last line that a command which failed said, else None."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        done = subprocess.run(command, env=kept, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"{Path(command[0]).name} {' '.join(command[1:4])} took more than {LIMIT_S:.0f} s"
    said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return None if done.returncode == 0 else (said or [f"exit code {done.returncode}"])[-1]
