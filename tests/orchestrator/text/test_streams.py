"""No print fails with an encoding error in any locale, and messages are short lines without control characters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator import cli
from orchestrator.text.streams import MOST_MESSAGES, MOST_SIGNS, one_line

ROOT = Path(__file__).resolve().parents[3]
# The environment of a shell without a locale, with Python's own workarounds switched off.
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}


def printed(code: str, **environ: str) -> bytes:
    environment = {**os.environ, **ASCII, **environ}
    plain = code.encode("ascii", "backslashreplace").decode()  # Python decodes its own command line by the locale
    done = subprocess.run([sys.executable, "-c", plain], cwd=ROOT, env=environment, capture_output=True, check=True)
    return done.stdout


def test_characters_that_an_encoding_lacks_are_spelled_out() -> None:
    code = "from orchestrator.text.streams import take_any_text as t; t(); print('2Ψ·(N-1)/N × 2, ∂')"
    assert printed(code) == b"2Psi*(N-1)/N x 2, \\u2202\n"
    assert printed(code, PYTHONIOENCODING="latin-1") == "2Psi·(N-1)/N × 2, \\u2202\n".encode("latin-1")
    assert printed(code, PYTHONIOENCODING="utf-8") == "2Ψ·(N-1)/N × 2, ∂\n".encode()


def test_the_command_line_prints_tables_and_symbols_in_ascii() -> None:
    code = (
        "from orchestrator import cli; cli.main(['--help'])\n"
        "from orchestrator.report.screen import make_console; from rich.table import Table\n"
        "table = Table('2Ψ'); table.add_row('1 × 2'); make_console().print(table)"
    )
    told = printed(code)
    assert b"2Psi" in told
    assert b"1 x 2" in told


def test_a_full_disk_under_stdout_is_reported_in_one_line_with_code_1() -> None:
    code = "from orchestrator import cli; raise SystemExit(cli.main(['--help']))"
    with open("/dev/full", "wb") as full:
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(b"error: standard output: No space left on device")
    assert done.stderr.count(b"\n") == 1


def test_a_message_is_one_short_line_without_control_characters() -> None:
    assert one_line("zero=\x1b[2J\nerror: x\r\u202e\udcff é") == "zero=\\x1b[2J\\nerror: x\\r\\u202e\\udcff é"
    text = one_line("first" + "9" * 100_000 + "last")
    assert len(text) < MOST_SIGNS + 100
    assert text.startswith("first")
    assert text.endswith("last")
    assert "(97009 more characters)" in text


def test_only_the_first_of_hundreds_of_mistakes_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([f"key{number}=1" for number in range(300)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == MOST_MESSAGES + 2
    assert lines[-2] == "error: and 250 more"


@pytest.mark.parametrize(
    "word", ["a\x1b[2Jb", "\n", "\u202e", "zero=\x07", "x" * 100_000, "batch.micro=" + "9" * 100_000]
)
def test_odd_words_are_refused_in_one_line(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([word]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("error: ")
    assert first.isprintable()
    assert len(first) < MOST_SIGNS + 100
    assert second == "nothing was started (exit 2)"


def test_closed_standard_streams_are_replaced_by_dev_null_so_that_no_file_takes_their_place() -> None:
    code = (
        "import os, sys; from orchestrator import cli; code = cli.main(['--help'])\n"
        "sys.exit(code if [os.readlink(f'/dev/fd/{number}') for number in range(3)] == ['/dev/null'] * 3 else 9)"
    )
    line = ["/bin/sh", "-c", '"$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code]
    assert subprocess.run(line, cwd=ROOT, check=False).returncode == 0
