"""Tries every claim about GPUs in one command for a borrowed machine, and says which are confirmed and which refuted.

`python benchmarks/gpu.py [--only NAME,..] [--together N] [--limit S] [--list]`. Needs torch, numpy, safetensors and
pytest. A claim that fails or does not end within its limit does not stop the others. Writes
benchmarks/results/gpu_DATE.md and .json, unless nothing could be tried. Exit codes: 0 all claims are confirmed, 1 one
is refuted, 2 none could be tried (no CUDA device), 3 some could not be tried and the others are confirmed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks.gpu_claims import CLAIMS, UNREACHED, Claim  # noqa: E402

CONFIRMED, REFUTED, NOT_REACHED = "confirmed", "refuted", "unreached"
NO_DEVICE = "no CUDA device"
TAIL_BYTES = 4000


@dataclass(frozen=True)
class Outcome:
    """What became of a claim. `reason`: why it is refuted or unreached. `tail`: the end of the command's output."""

    claim: Claim
    verdict: str
    reason: str = ""
    seconds: float = 0.0
    tail: str = ""

    def line(self) -> str:
        why = f" ({self.reason})" if self.reason else ""
        return f"{self.verdict:9}  {self.claim.name:12}  {self.seconds:5.0f} s  {self.claim.expected}{why}"


def try_all(
    claims: Sequence[Claim], gpus: int, say: Callable[[str], None], folder: Path = ROOT, together: int = 1
) -> list[Outcome]:
    """The outcome of every claim, in their order. `gpus`: how many this machine has.

    `together`: how many claims whose verdict is no time run at once, before those that measure times one by one.
    """

    def tried(claim: Claim) -> Outcome:
        if gpus < claim.gpus:
            reason = NO_DEVICE if gpus == 0 else f"needs {claim.gpus} GPUs, found {gpus}"
            outcome = Outcome(claim, NOT_REACHED, reason)
        else:
            number = claims.index(claim) + 1
            say(f"{number} of {len(claims)}, at most {claim.limit_s:g} s: {shlex.join(claim.command)}")
            outcome = _try(claim, folder)
        output = [f"    {line}" for line in outcome.tail.splitlines()] if outcome.verdict == REFUTED else []
        say("\n".join([outcome.line(), *output]))
        return outcome

    untimed = [claim for claim in claims if not claim.timed]
    with ThreadPoolExecutor(together) as pool:
        outcomes = dict(zip(untimed, pool.map(tried, untimed), strict=True))
    return [outcomes[claim] if claim in outcomes else tried(claim) for claim in claims]


def _try(claim: Claim, folder: Path) -> Outcome:
    begun = time.monotonic()
    with tempfile.TemporaryFile() as output:
        code = _exit_code(claim, folder, output)
        seconds = time.monotonic() - begun
        output.seek(max(output.seek(0, os.SEEK_END) - TAIL_BYTES, 0))
        tail = output.read().decode(errors="replace")
    done = Outcome(claim, CONFIRMED, "", seconds, tail)
    if code == 0:
        return done
    last = next((line.strip() for line in reversed(tail.splitlines()) if line.strip()), "no output")
    if code in UNREACHED:
        return replace(done, verdict=NOT_REACHED, reason=last)
    ended = "did not end within its limit" if code is None else f"exit code {code}: {last}"
    return replace(done, verdict=REFUTED, reason=ended)


def _exit_code(claim: Claim, folder: Path, output: IO[bytes]) -> int | None:
    """The command's exit code; None if it did not end in time. No process of its session is left."""
    process = subprocess.Popen(
        claim.command,
        cwd=folder,
        env={**os.environ, **claim.variables},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.wait(claim.limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # ranks that the command has left behind too
        process.wait()


def exit_code(outcomes: Sequence[Outcome]) -> int:
    verdicts = [outcome.verdict for outcome in outcomes]
    if REFUTED in verdicts:
        return 1
    if CONFIRMED not in verdicts:
        return 2
    return 3 if NOT_REACHED in verdicts else 0


def summary(outcomes: Sequence[Outcome]) -> str:
    """One line: how many claims have each verdict, and the names of those that are not confirmed."""
    parts = []
    for verdict in (CONFIRMED, REFUTED, NOT_REACHED):
        names = [outcome.claim.name for outcome in outcomes if outcome.verdict == verdict]
        listed = f" ({', '.join(names)})" if names and verdict != CONFIRMED else ""
        parts.append(f"{len(names)} {verdict}{listed}")
    return "; ".join(parts)


def report(outcomes: Sequence[Outcome], folder: Path) -> Path:
    """Writes the outcomes as a table, and with the output of each command as JSON. Returns the table's path."""
    machine = next((outcome.tail for outcome in outcomes if outcome.claim.name == "device"), "")
    lines = [f"# Claims about GPUs, {date.today()}", "", summary(outcomes), "", machine.strip(), ""]
    lines += ["| claim | verdict | s | expected | why | command |", "|---|---|---|---|---|---|"]
    for outcome in outcomes:
        claim = outcome.claim
        variables = [f"{name}={value}" for name, value in claim.variables.items()]
        command = " ".join([*variables, shlex.join(["python", *claim.command[1:]])])
        why = outcome.reason.replace("|", "/")
        lines.append(
            f"| {claim.name} | {outcome.verdict} | {outcome.seconds:.0f} | {claim.expected} | {why} | `{command}` |"
        )
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"gpu_{date.today()}"
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    text = json.dumps([asdict(outcome) for outcome in outcomes])
    stem.with_suffix(".json").write_text(text.replace(sys.executable, "python"), encoding="utf-8")
    return stem.with_suffix(".md")


def gpus_here() -> int:
    """The number of GPUs that torch can use, asked for in another process: a context here would take their memory."""
    words = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    asked = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    if asked.returncode != 0:
        sys.exit(f"make gpu: expected a torch that can be imported, found: {asked.stderr.strip()}")
    return int(asked.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="names of claims, separated by commas")
    parser.add_argument("--together", type=int, default=1, metavar="N", help="claims that measure no time at once")
    parser.add_argument("--limit", type=float, default=math.inf, metavar="S", help="the most seconds for each claim")
    parser.add_argument("--list", action="store_true", help="print the claims and try none")
    args = parser.parse_args()
    names = [name for name in args.only.split(",") if name]
    if unknown := set(names) - {claim.name for claim in CLAIMS}:
        parser.error(f"--only: expected names of claims, found {', '.join(sorted(unknown))}; --list shows them")
    claims = [
        replace(claim, limit_s=min(claim.limit_s, args.limit)) for claim in CLAIMS if not names or claim.name in names
    ]
    if args.list:
        for claim in claims:
            print(f"{claim.name:12}  {claim.expected}\n{'':12}  {shlex.join(claim.command)}")
        return 0
    outcomes = try_all(claims, gpus_here(), lambda text: print(text, flush=True), together=args.together)
    print(summary(outcomes))
    code = exit_code(outcomes)
    if code != 2:
        print(f"written: {report(outcomes, ROOT / 'benchmarks' / 'results').relative_to(ROOT)}")
    return code


if __name__ == "__main__":
    sys.exit(main())
