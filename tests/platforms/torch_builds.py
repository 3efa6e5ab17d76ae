"""Other builds of torch beside the installed one, each in a virtual environment that shares the other packages.

`torch-cpu`: a build without CUDA. PyPI has none for Linux: pip's options that lead to one are the value of
ZLAB_CPU_TORCH, such as `--index-url` and the address of torch's own index of CPU builds, or `--no-index --find-links`
and a folder of wheels. `torch-lowest` and `torch-highest`: the ends of the range in pyproject.toml, from where pip
installs, whatever constraints it has; with the lowest torch comes the lowest transformers. They are gigabytes, and are
made only if they are asked for by name.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import site
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CPU = "ZLAB_CPU_TORCH"
LIMIT_S = 900.0  # of a download
REQUIREMENT = r'"{}>=([\d.]+),<([\d.]+)"'


class LeftOutError(Exception):
    """Why a build cannot be had here."""


def version(python: str = sys.executable) -> str:
    """The version of an interpreter's torch, with its build: 2.13.0+cu130; none if it has no torch."""
    inside = "from importlib import util; print(__import__('torch').__version__ if util.find_spec('torch') else 'none')"
    words = [python, "-c", inside]
    return subprocess.run(words, capture_output=True, text=True, check=True, cwd="/").stdout.strip()


def cpu(folder: Path) -> str:
    """The interpreter of an environment with the highest CPU build in the range."""
    options = os.environ.get(CPU, "")
    if not options:
        raise LeftOutError(f"no CPU build at hand; {CPU}='--index-url ...' says where pip finds one")
    lowest, above = _range()
    python = beside(folder)
    pip(python, "install", "--no-deps", "--ignore-installed", *shlex.split(options), f"torch>={lowest},<{above}")
    if "+cpu" not in version(python):
        raise LeftOutError(f"{CPU} leads to torch {version(python)}, which is no CPU build")
    return python


def lowest(folder: Path) -> str:
    """The interpreter of an environment with the lowest version of the range, and the lowest transformers."""
    python = beside(folder)
    pip(python, "install", *(f"{package}=={_range(package)[0]}" for package in ("torch", "transformers")))
    return python


def highest(folder: Path) -> str:
    """The interpreter of an environment with the highest version that there is within the range."""
    lowest, above = _range()
    python = beside(folder)
    asked = f"torch>={lowest},<{above}"
    told = pip(python, "install", "--dry-run", "--no-deps", "--ignore-installed", "--report", "-", asked)
    found = json.loads(told)["install"][0]["metadata"]["version"]
    if found == version().partition("+")[0]:
        raise LeftOutError(f"the installed torch is the highest that there is, {found}")
    pip(python, "install", f"torch=={found}")
    return python


def _range(package: str = "torch") -> tuple[str, str]:
    """The lowest version of a package that pyproject.toml allows, and the one above all of them."""
    wanted = REQUIREMENT.format(package)
    found = re.search(wanted, (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert found is not None, f"pyproject.toml: expected {wanted}"
    return found[1], found[2]


def beside(folder: Path) -> str:
    """The interpreter of a new environment without packages of its own, which finds those of this one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    inside = "import sysconfig; print(sysconfig.get_path('purelib'))"
    place = subprocess.run([python, "-c", inside], capture_output=True, text=True, check=True).stdout.strip()
    shared = "import site; " + "; ".join(f"site.addsitedir({path!r})" for path in site.getsitepackages())
    Path(place, "shared.pth").write_text(shared + "\n", encoding="utf-8")
    return str(python)


def pip(python: str, *words: str) -> str:
    """What pip printed. LeftOutError with its last line if it failed."""
    own = ("--quiet", "--disable-pip-version-check", "--no-cache-dir")
    command = [sys.executable, "-m", "pip", "--python", python, words[0], *own, *words[1:]]
    environment = {**os.environ, "PIP_CONSTRAINT": os.devnull}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise LeftOutError(f"pip took more than {LIMIT_S:.0f} s") from error
    if done.returncode != 0:
        raise LeftOutError(f"pip failed: {(done.stderr.strip().splitlines() or ['without a word'])[-1]}")
    return done.stdout
