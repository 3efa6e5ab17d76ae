"""The comparison of engines in README.md: runs sweeps/engines.yaml, keeps its report, and writes README's table.

`python benchmarks/engines.py [OVERRIDE ..]` runs the sweep with these overrides, in parts of one precision and one
table: the ranks of all its points are too many for the memory of a small machine, and would start again for each round.
`--sweep FOLDER`, once or several times, takes sweeps of before. Reports and pictures go into
results/engines_DATE/, and their table between the marks of README.md.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
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
# At stage 3 DeepSpeed allocates its bucket whole, by default for 5e8 elements. Its users set it for smaller models (as
# transformers' "auto" does); this one holds all of the shipped model, so that no message is divided.
BUCKET = "engine.deepspeed.zero_optimization.reduce_bucket_size=2000000"
PARTS = [(precision, at_limit) for precision in ("fp32", "bf16") for at_limit in ("false", "true")]
ENGINES = {"zero": "zero-lab", "deepspeed": "DeepSpeed", "fsdp2": "FSDP2", "ddp": "DDP"}
BEGIN, END = "<!-- benchmarks/engines.py writes this table -->\n", "<!-- its end -->"
Row = Mapping[str, str]  # of results.csv


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--sweep", type=Path, action="append", help="the folder of a sweep that has run")
    parser.add_argument("--precision", choices=("fp32", "bf16"), help="the parts of one precision alone")
    parser.add_argument("--at-limit", choices=("true", "false"), help="the parts of one of the two tables alone")
    asked = parser.parse_args()
    parts = [part for part in PARTS if asked.precision in (None, part[0]) and asked.at_limit in (None, part[1])]
    sweeps = asked.sweep or [run([*asked.overrides, f"precision={one}", f"batch.at_limit={at}"]) for one, at in parts]
    results = [(sweep, rows_of(sweep)) for sweep in sweeps]
    rows = [row for _, own in results for row in own]
    kept = keep(results, ROOT / "benchmarks" / "results")
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    readme.write_text(with_table(text, table(rows)), encoding="utf-8")
    print(f"written: {kept} and the table of {readme}")


def rows_of(sweep: Path) -> list[Row]:
    """The rows of results.csv. Where all have one precision it is no column, but in the command of each."""
    with (sweep / "results.csv").open(encoding="utf-8") as file:
        return [
            {"precision": "".join(re.findall(r"precision=(\w+)", row["command"])[:1]), **row}
            for row in csv.DictReader(file)
        ]


def run(overrides: Sequence[str]) -> Path:
    """Runs the sweep and returns its folder. Rows that did not fit are an answer; failed ones are not."""
    output = ROOT / "outputs"
    command = [sys.executable, str(ROOT / "run.py"), *COMMAND, LIMIT, BUCKET, f"output={output}", *overrides]
    if (code := subprocess.run(command, cwd=ROOT, env={**os.environ, "DS_ACCELERATOR": "cpu"}).returncode) != 0:
        sys.exit(f"engines.py: the sweep ended with exit code {code}; its folder is in {output / 'sweeps'}")
    return max((output / "sweeps").glob("*_engines"))


def keep(sweeps: Sequence[tuple[Path, Sequence[Row]]], results: Path) -> Path:
    """Copies report.md, results.csv and the pictures of each sweep into a folder by the day of the measurement."""
    day = max(row["measured_at"] for _, rows in sweeps for row in rows)[:10] or time.strftime("%Y-%m-%d")
    folder = results / f"engines_{day}"
    shutil.rmtree(folder, ignore_errors=True)
    for sweep, rows in sweeps:
        named = [row for row in rows if row["engine"] in ENGINES]
        tables = {"limit" if row["at_limit"] == "True" else "batch" for row in named}
        own = folder / "_".join([*sorted({row["precision"] for row in named}), *sorted(tables)])
        own.mkdir(parents=True)
        for name in ("report.md", "results.csv"):
            text = (sweep / name).read_text(encoding="utf-8")
            (own / name).write_text(text.replace(f"{ROOT}{os.sep}", ""), encoding="utf-8")  # no folder of this machine
        shutil.copytree(sweep / "pictures", own / "pictures")
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
