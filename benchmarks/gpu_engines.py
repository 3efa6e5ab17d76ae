"""Runs sweeps/engines.yaml on the GPUs of this machine: zero-lab, DeepSpeed, FSDP2 and DDP on the same work.

`python benchmarks/gpu_engines.py [--ranks N] [WORD ...]`: the words are settings that replace those of the sweep. It
needs the program's own packages, unlike the other claims of `make gpu`: `pip install -e '.[deepspeed]'` in a checkout.
Without DeepSpeed its rows are refused, and the others run. Exit codes: those of run.py; 2 where a package is missing.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Modules that a sweep imports, by the distribution that has them.
NEEDED = {
    "hydra-core": "hydra",
    "submitit": "submitit",
    "transformers": "transformers",
    "rich": "rich",
    "psutil": "psutil",
    "pyyaml": "yaml",
    "jinja2": "jinja2",
    "matplotlib": "matplotlib",
}


def lacks_packages(extra: str, *more: str) -> bool:
    """Whether packages of the program are missing here, and those of `more`; it says which, and what to install."""
    needed = NEEDED | {name: name for name in more}
    missing = [name for name, module in needed.items() if find_spec(module) is None]
    if missing:
        print(f"expected the program's packages, found no {', '.join(missing)}: pip install -e '.[{extra}]'")
    return bool(missing)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="null", help="the number of GPUs (default: all)")
    parser.add_argument("words", nargs="*", help="settings, such as model=llama_1b batch.seq=2048")
    args = parser.parse_args()
    if lacks_packages("deepspeed"):
        return 2
    places = ["resources.device=cuda", f"resources.ranks={args.ranks}", "tracking=none"]
    words = [sys.executable, "run.py", "sweeps=engines", *places, "output=outputs/gpu_engines", *args.words]
    return subprocess.run(words, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
