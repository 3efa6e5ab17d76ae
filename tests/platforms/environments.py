"""Virtual environments of other Pythons and of another Hydra, for the variations of run.py, each made for one run.

`python-3.10` and its like lack torch, transformers and MLflow, and take half a minute to make: composition, rules,
records and reports need none of them. `training-3.10` and its like have all, gigabytes, and are made only if named.
`hydra-1.4` shares the packages that are installed, and has that version of Hydra.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from platforms.torch_builds import ROOT, LeftOutError, beside, pip

VERSIONS = ("3.10", "3.11", "3.12", "3.13")
HERE = f"{sys.version_info[0]}.{sys.version_info[1]}"
LARGE = ("torch", "transformers", "mlflow")
TESTING = ("pytest>=8", "pytest-timeout", "pytest-xdist")
HYDRA = "hydra-core>=1.4.0rc3,<1.5"


def with_words(folder: Path, version: str) -> str:
    """The interpreter of an environment in which command lines are read, and nothing is trained."""
    return _made(folder, version, [one for one in _needed() if re.split(r"[^\w-]", one)[0] not in LARGE])


def with_training(folder: Path, version: str) -> str:
    """The interpreter of an environment with all that the product needs."""
    return _made(folder, version, _needed())


def with_hydra(folder: Path) -> str:
    """The interpreter of an environment that has HYDRA, and the installed packages beside it."""
    python = beside(folder)
    pip(python, "install", HYDRA)
    return python


def _needed() -> list[str]:
    listed = (ROOT / "pyproject.toml").read_text(encoding="utf-8").split("\ndependencies = [", 1)[1].split("\n]", 1)[0]
    return re.findall(r'^ +"(.+?)"', listed, re.MULTILINE)


def _made(folder: Path, version: str, requirements: list[str]) -> str:
    subprocess.run([_program(version), "-m", "venv", "--without-pip", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    pip(python, "install", *requirements, *TESTING)
    return python


def _program(version: str) -> str:
    """The Python of that version. pyenv's programs run a version only if its setting names it."""
    name = f"python{version}"
    found = shutil.which(name)
    if found is None:
        raise LeftOutError(f"no {name} on the PATH")
    asked = [found, "-c", "import sys; print(sys.executable)"]
    done = subprocess.run(asked, env={**os.environ, "PYENV_VERSION": version}, capture_output=True, text=True)
    if done.returncode != 0:
        raise LeftOutError(f"{name} on the PATH does not start")
    return done.stdout.strip()
