"""The comparison of engines in README.md: runs sweeps/engines.yaml, keeps its report, and writes README's table.

`python benchmarks/engines.py [OVERRIDE ..]` runs the sweep with these overrides; `--sweep FOLDER` takes one of before.
The report and its pictures go into results/engines_DATE/, and its table between the marks of README.md.
"""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from orchestrator.text.units import digits, size  # noqa: E402
from orchestrator.wings.engines.places import AT_ITS_LIMIT, AT_SAME_BATCH  # noqa: E402

COMMAND = ("sweeps=engines", "measure=standard", "resources.ranks=2", "resources.device=cpu", "tracking=none")
# A CPU rank has no memory of its own: with this much, micro-batches of 4 to 16 of the shipped model fit, by engine.
LIMIT = "resources.memory_mib=100"
ENGINES = {"zero": "zero-lab", "deepspeed": "DeepSpeed", "fsdp2": "FSDP2", "ddp": "DDP"}
BEGIN, END = "<!-- benchmarks/engines.py writes this table -->\n", "<!-- its end -->"
Row = Mapping[str, str]  # of results.csv


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--sweep", type=Path, help="the folder of a sweep that has run")
    asked = parser.parse_args()
    sweep = asked.sweep or run(asked.overrides)
    with (sweep / "results.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    kept = keep(sweep, rows, ROOT / "benchmarks" / "results")
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    readme.write_text(with_table(text, table(rows)), encoding="utf-8")
    print(f"written: {kept} and the table of {readme}")


def run(overrides: Sequence[str]) -> Path:
    """Runs the sweep and returns its folder. Rows that did not fit are an answer; failed ones are not."""
    output = ROOT / "outputs"
    command = [sys.executable, str(ROOT / "run.py"), *COMMAND, LIMIT, f"output={output}", *overrides]
    if (code := subprocess.run(command, cwd=ROOT, env={**os.environ, "DS_ACCELERATOR": "cpu"}).returncode) != 0:
        sys.exit(f"engines.py: the sweep ended with exit code {code}; its folder is in {output / 'sweeps'}")
    return max((output / "sweeps").glob("*_engines"))


def keep(sweep: Path, rows: Sequence[Row], results: Path) -> Path:
    """Copies report.md, results.csv and the pictures, named by the day of the measurement."""
    day = max(row["measured_at"] for row in rows)[:10] or time.strftime("%Y-%m-%d")
    folder = results / f"engines_{day}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in ("report.md", "results.csv"):
        shutil.copy2(sweep / name, folder)
    shutil.copytree(sweep / "pictures", folder / "pictures")
    return folder


def with_table(text: str, lines: Sequence[str]) -> str:
    """The text with these lines between its marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        sys.exit(f"engines.py: README.md has no table between {BEGIN.strip()} and {END}")
    return "".join([before, begin, "\n", *(f"{line}\n" for line in lines), "\n", end, after])


def table(rows: Sequence[Row]) -> list[str]:
    """tokens/s and memory of every engine: a row for each batch, precision and stage, the winners in bold."""
    lines = [f"| batch | precision | stage | {' | '.join(ENGINES.values())} |", "|---" * (3 + len(ENGINES)) + "|"]
    for at_limit, name in ((False, AT_SAME_BATCH), (True, AT_ITS_LIMIT)):
        own = [row for row in rows if (row["at_limit"] == "True") == at_limit and row["engine"] in ENGINES]
        for precision, stage in sorted({(row["precision"], row["zero"]) for row in own}):
            found = {row["engine"]: row for row in own if (row["precision"], row["zero"]) == (precision, stage)}
            cells = " | ".join(cell(found[engine]) if engine in found else "" for engine in ENGINES)
            lines.append(f"| {name} | {precision} | {stage.removeprefix('stage')} | {cells} |")
    return lines


def cell(row: Row) -> str:
    """A row as "12,345, 512 MiB": its speed in tokens/s and its peak above the start; or why it has none."""
    if not row["tokens_per_second_median"]:
        return row["state"]
    above = row["peak_above_start_bytes"]
    text = digits(float(row["tokens_per_second_median"])) + (f", {size(float(above))}" if above else "")
    if row["work"] != "=":
        return f"{text} ({row['work']})"
    return f"**{text}**" if row["place"] == "1" else text


if __name__ == "__main__":
    main()
