"""`zlab doctor --bundle`: one file for an issue, without secrets and without names of users, machines and homes."""

from __future__ import annotations

import getpass
import json
import os
import re
import shlex
import socket
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from orchestrator.machine import provenance
from orchestrator.records.sweep_record import all_sweeps
from orchestrator.report.screen import Screen
from orchestrator.report.summary import Row
from orchestrator.text.units import size

ATTEMPTS, LAST_BYTES = 8, 1 << 18
REDACTED = "[redacted]"
_SECRET = r"(?:token|secret|passw(?:or)?d|passphrase|api[_-]?key|access[_-]?key|private[_-]?key|credentials?)"
# Only the groups of each match are kept.
_PATTERNS = (
    r"(://)[^/\s@\"']+(?=@)",
    rf"(--[\w-]*{_SECRET}[\"']?[\s,=:]+[\"']?)[^\s\"']+",
    rf"({_SECRET}[\"']?\s*[:=]\s*[\"']?)[^\s\"',;&}}]+",
    r"(\bbearer\s+)\S+",
    r"()\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abp]-|AKIA)[\w-]{8,}",
    r"(/(?:home|Users)/)[^/\s\"':]+",
)


def write(file: Path, output: Path, findings: Sequence[str]) -> int:
    """Write the file, and print what is in it. findings: the lines of the doctor. Returns the exit code."""
    screen, rows = Screen(), []
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as bundle:
        for name, text in [("doctor.txt", "\n".join(findings)), *_records(output)]:
            rows.append(Row(redacted(name), size(len(clean := redacted(text).encode()))))
            bundle.writestr(rows[-1].name, clean)
    screen.rows(rows)
    screen.closing([Row("bundle", str(file)), Row("next", f"unzip -p {shlex.quote(str(file))} | less")])
    screen.say("Secrets and the names of users, machines and homes were removed. Read it before you attach it.")
    return 0


def _records(output: Path) -> Iterator[tuple[str, str]]:
    """Versions, the last sweep and the last attempts: their configurations, states and errors, and the ends of logs."""
    yield "versions.json", json.dumps(provenance.facts(), indent=1)
    folders = [sweep.root for sweep in all_sweeps(output)[:1]]
    states = sorted(output.absolute().glob("points/*/attempts/*/state.json"), key=lambda path: path.stat().st_mtime)
    folders += [state.parent for state in reversed(states[-ATTEMPTS:])]
    for folder in folders:
        for path in sorted(path for path in folder.iterdir() if path.suffix in (".json", ".jsonl", ".log")):
            yield str(path.relative_to(output.absolute())), path.read_bytes()[-LAST_BYTES:].decode(errors="replace")


def redacted(text: str) -> str:
    """The text without secrets, and without names of users, machines and homes."""
    named = re.compile(rf"{_SECRET}$|_key$", re.IGNORECASE)
    secrets = [value for name, value in os.environ.items() if named.search(name) and len(value) > 3]
    for value in sorted(secrets, key=len, reverse=True):  # one may be a part of another
        text = text.replace(value, REDACTED)
    text = text.replace(str(Path.home()), "~").replace(os.path.realpath(Path.home()), "~")
    for pattern in _PATTERNS:
        text = re.sub(pattern, rf"\1{REDACTED}", text, flags=re.IGNORECASE)
    host = socket.gethostname()
    for name, other in ((host, "HOST"), (host.partition(".")[0], "HOST"), (getpass.getuser(), "USER")):
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", other, text)
    return text
