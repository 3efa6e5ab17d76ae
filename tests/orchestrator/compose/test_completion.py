"""Tab completion offers what the next word may be, without the modules that run anything."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.commands import completion as command
from orchestrator.compose import completion
from orchestrator.compose.arguments import VERBS
from orchestrator.compose.settable import read_tree

ROOT = Path(__file__).resolve().parents[3]
FLAGS = {"report": ["--output", "--against"], "logs": ["--rank"]}
SWEEPS = ["2026-01-01_00-00-00_stages", "2026-01-02_00-00-00_batch"]


def offered(line: str) -> list[str]:
    return completion.candidates(completion.typed_words(line), read_tree(), FLAGS, SWEEPS)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("zlab zero=", ["zero=stage0", "zero=stage1", "zero=stage2", "zero=stage3"]),
        ("zlab -m zero=stage1,stage3,", ["zero=stage1,stage3,stage0", "zero=stage1,stage3,stage2"]),
        ("zlab zero=stage2 zero.pre", ["zero.prefetch="]),
        ("zlab zero.reduce_at_boundary=", ["zero.reduce_at_boundary=true", "zero.reduce_at_boundary=false"]),
        ("zlab zero.gather_dtype=", ["zero.gather_dtype=int8", "zero.gather_dtype=null"]),
        ("zlab offload.params=n", ["offload.params=nvme"]),
        ("zlab rep", ["report "]),
        ("zlab zero=stage2 rep", []),
        ("zlab report --a", ["--against "]),
        ("zlab report 2026-01-02", ["2026-01-02_00-00-00_batch "]),
        ("zlab report ", ["last ", *(f"{name} " for name in reversed(SWEEPS))]),
        ("zlab fit hardware=a100_8", ["hardware=a100_80gb"]),
        ("zlab completion ", ["bash ", "zsh ", "fish "]),
        ("zlab --help zer", ["zero "]),
        ("zlab --prune ", ["safe ", "off "]),
        ("zlab --pl", ["--plan "]),
        ("python run.py zero=stage3", ["zero=stage3"]),
        (".venv/bin/python3 ./run.py report --ag", ["--against "]),
        ("zlab seed", ["seed="]),
        ("zlab nothing", []),
    ],
)
def test_the_next_word_is_offered(line: str, expected: list[str]) -> None:
    assert offered(line) == expected


def test_an_empty_line_offers_verbs_and_groups_and_no_keys() -> None:
    found = offered("zlab ")
    assert {"report ", "zero=", "sweeps=", "seed="} <= set(found)
    assert not [word for word in found if "." in word]


def test_the_flags_that_are_kept_in_the_shells_code_are_those_of_the_parsers() -> None:
    flags = command._flags()
    assert set(flags) == set(VERBS)
    assert {"--against", "--threshold", "--json"} <= set(flags["report"])
    assert "--rank" in flags["logs"]
    assert "--rank" not in flags["report"]
    text = completion.script("bash", "zlab", flags)
    kept = text.partition("--flags '")[2].partition("'")[0]
    assert completion.read_flags(kept) == flags


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_each_shell_gets_code_without_placeholders(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([shell]) == 0
    code = capsys.readouterr().out
    assert "--line" in code
    for name in ("PROGRAM", "FLAGS", "NAMES", "REGISTER"):
        assert name not in code


def completed_by_bash(*words: str, cwd: Path) -> list[str]:
    """What bash itself offers after the words, the last of which is being typed."""
    program = [sys.executable, str(ROOT / "run.py")]
    code = subprocess.run([*program, "completion", "bash"], capture_output=True, text=True, check=True, cwd=cwd).stdout
    line = " ".join([*program, *words])
    array = " ".join(f"'{word}'" for word in [*program, *words])
    ask = f"COMP_WORDS=({array}); COMP_CWORD={len(words) + 1}; COMP_LINE='{line}'; COMP_POINT={len(line)}; _zlab"
    show = 'printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", f"{code}\n{ask}\n{show}"], capture_output=True, text=True, check=True, cwd=cwd)
    return done.stdout.splitlines()


def test_bash_completes_what_follows_the_last_equals_sign(tmp_path: Path) -> None:
    assert completed_by_bash("zero=stage1,stage2", cwd=tmp_path) == ["stage1,stage2"]
    assert completed_by_bash("report", "--ag", cwd=tmp_path) == ["--against "]


def test_completing_a_word_imports_nothing_that_runs_points() -> None:
    heavy = ("torch", "hydra", "rich", "orchestrator.commands.line", "orchestrator.commands.verbs")
    program = (
        "import sys; from orchestrator.cli import main; main(['completion', '--line', 'zlab zero=']); "
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "[]"
