"""Run those parts of DeepSpeed's own unit tests that ask for public behaviour, against zero_runtime.

    python tests/deepspeed_suite/run.py CHECKOUT --out FOLDER [--files PART ...] [-k EXPRESSION] [--jobs 1]

CHECKOUT is a checkout of DeepSpeed's repository that you have; nothing is fetched and no file of it is changed. The
results of each file are appended to FOLDER, and tests that have one are not run again: a run can be interrupted, and be
made in parts. `--again` runs the chosen tests once more; `--report` only prints what FOLDER has. See reasons.py for the
kinds, and harness.py for what runs differently from DeepSpeed's own harness.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

from reasons import FILES, KINDS, Kind, kind_of  # noqa: E402

SAMPLED = 4  # parameter sets of one test function, unless --sampled says otherwise
_ONE_FILE_S = 3600.0


def main(words: Sequence[str]) -> int:
    """Exit code 0: no test is wrong or without a class. 1: one is. 2: the folder is no checkout."""
    asked = _parser().parse_args(words)
    source = asked.checkout / "tests" / "unit"
    if not (source / "common.py").is_file():
        print(f"error: expected a checkout of DeepSpeed with tests/unit/common.py, found {asked.checkout}")
        return 2
    out = asked.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    files = [name for name in FILES if not asked.files or any(part in name for part in asked.files)]
    if not asked.report:
        with tempfile.TemporaryDirectory(prefix="deepspeed-suite-") as name:
            folder = Path(name)
            # Names of packages of tests may not meet those of ours, and the checkout stays as it is.
            for part in ("unit", "model"):  # some tests read a configuration of a model
                if (source.parent / part).is_dir():
                    shutil.copytree(source.parent / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
            with ThreadPoolExecutor(asked.jobs) as pool:
                list(pool.map(partial(_run, asked=asked, folder=folder, out=out), files))
    results = {name: _results(out, name) for name in files}
    unclear = _print(results, asked.details)
    Path(out, "summary.json").write_text(json.dumps(_summary(results), indent=1) + "\n", encoding="utf-8")
    return 1 if unclear else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results, made if it is not there")
    parser.add_argument("--files", nargs="*", default=[], help="parts of names of files below tests/unit")
    parser.add_argument("-k", default="", help="as pytest's")
    parser.add_argument("--jobs", type=int, default=1, help="files at a time")
    parser.add_argument("--sampled", type=int, default=SAMPLED, help="parameter sets of one function; 0 for all")
    parser.add_argument("--again", action="store_true", help="also run tests that have a result")
    parser.add_argument("--report", action="store_true", help="run nothing, print the results")
    parser.add_argument("--details", nargs="*", default=[], choices=[kind.name for kind in Kind])
    return parser


def _run(name: str, asked: argparse.Namespace, folder: Path, out: Path) -> None:
    done = [] if asked.again else [one["test"] for one in _results(out, name)]
    told = {"checkout": str(asked.checkout.resolve()), "results": str(_place(out, name)), "sampled": asked.sampled}
    own = {"DEEPSPEED_SUITE": json.dumps(told | {"done": done}), "PYTHONPATH": f"{folder}:{HERE}:{ROOT}"}
    place = folder / "tmp" / name.replace("/", "+")
    place.mkdir(parents=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "harness", "-p", "no:cacheprovider", "-o", "addopts="]
    command += ["--rootdir", str(folder), "--basetemp", str(place / "pytest"), "-k", asked.k, f"unit/{name}"]
    environment = {**os.environ, **own, "TMPDIR": str(place), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        ran = subprocess.run(command, cwd=folder, env=environment, timeout=_ONE_FILE_S, capture_output=True, text=True)
        lines = (
            ran.stdout.splitlines()[-3:] if ran.returncode in (0, 1, 5) else [ran.stdout[-3000:], ran.stderr[-3000:]]
        )
    except subprocess.TimeoutExpired:
        lines = [f"not done after {_ONE_FILE_S:.0f} s; run it again to go on"]
    print(f"{name}: {' '.join(line for line in lines if line).strip()}", flush=True)
    shutil.rmtree(place, ignore_errors=True)


def _place(out: Path, name: str) -> Path:
    return out / (name.replace("/", "+") + ".jsonl")


def _results(out: Path, name: str) -> list[dict[str, Any]]:
    """The last result of each test of the file."""
    place = _place(out, name)
    lines = place.read_text(encoding="utf-8").splitlines() if place.is_file() else []
    found: dict[str, dict[str, Any]] = {}
    for one in map(json.loads, lines):
        found[one["test"]] = one
    return list(found.values())


def _summary(results: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    counts = {name: Counter(kind_of(one).name for one in tests) for name, tests in results.items() if tests}
    tests = {one["test"]: {"kind": kind_of(one).name, **one} for found in results.values() for one in found}
    return {"files": counts, "tests": tests}


def _print(results: dict[str, list[dict[str, Any]]], details: Sequence[str]) -> int:
    """Print the counts by file and kind, the details asked for and what is unclear in full; how many are unclear."""
    sums: Counter[Kind] = Counter()
    unclear = 0
    for name, tests in results.items():
        kinds = [kind_of(one) for one in tests]
        sums.update(kinds)
        if tests:
            counts = Counter(kinds)
            print(f"{name:62} " + "  ".join(f"{kind.name} {counts[kind]}" for kind in Kind if counts[kind]))
    for found in results.values():
        for one in found:
            kind = kind_of(one)
            if kind is Kind.wrong:
                unclear += 1
                print(f"\n---- {one['test']}\n{one['error']}\n{one['trace']}")
            elif kind.name in details:
                print(f"\n{kind.name}: {one['test']}\n    {one['error'].splitlines()[0] if one['error'] else ''}")
    print(f"\n{sum(sums.values())} tests")
    for kind in Kind:
        print(f"{sums[kind]:5}  {KINDS[kind]}")
    return unclear


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
