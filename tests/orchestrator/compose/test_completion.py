"""Tab completion offers what the next word may be, without the modules that run anything."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from orchestrator.commands import completion as command
from orchestrator.compose import completion
from orchestrator.compose.arguments import VERBS
from orchestrator.compose.settable import read_tree
from orchestrator.records.run_state import RunState
from orchestrator.records.sweep_record import Planned, open_sweep

ROOT = Path(__file__).resolve().parents[3]
SWEEPS = ["2026-01-01_00-00-00_stages", "2026-01-02_00-00-00_batch"]
NEWEST_FIRST = ["last ", *(f"{name} " for name in reversed(SWEEPS))]
POINTS = {"last": ["stage0", "stage1"], SWEEPS[0]: ["micro1", "micro2"]}


@cache
def taken() -> dict[str, dict[str, list[str] | None]]:
    return command._taken()


def offered(line: str) -> list[str]:
    return completion.candidates(completion.typed_words(line), read_tree(), taken(), SWEEPS, POINTS.__getitem__)


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
        ("zlab report ", NEWEST_FIRST),
        ("zlab report last ", []),
        ("zlab report last --against ", NEWEST_FIRST),
        ("zlab compare last ", NEWEST_FIRST),
        ("zlab sync ", NEWEST_FIRST),
        ("zlab logs last ", ["stage0 ", "stage1 "]),
        ("zlab logs last stage0 ", []),
        ("zlab logs --rank 1 last ", ["stage0 ", "stage1 "]),
        (f"zlab cancel {SWEEPS[0]} micro1 ", ["micro1 ", "micro2 "]),
        (f"zlab export --sweep {SWEEPS[0]} micro", ["micro1 ", "micro2 "]),
        ("zlab export stage", ["stage0 ", "stage1 "]),
        ("zlab export zero=stage3 --to ", ["deepspeed ", "fsdp2 ", "ddp "]),
        ("zlab export --to=d", ["--to=deepspeed ", "--to=ddp "]),
        ("zlab export --to fsdp2 zero=stage3", ["zero=stage3"]),
        ("zlab export --out ", []),
        ("zlab fit --as d", ["ddp ", "deepspeed "]),
        ("zlab fit model=llama2_7b --as fsdp2 hardware=a100_8", ["hardware=a100_80gb"]),
        ("zlab import ", []),
        ("zlab import ds.json zero=stage3", ["zero=stage3"]),
        ("zlab export-weights --d", ["--dtype "]),
        ("zlab launch --dev", ["--device "]),
        ("zlab --config-dir ", []),
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


def test_a_label_to_export_is_offered_beside_settings() -> None:
    found = offered("zlab export ")
    assert {"stage0 ", "zero="} <= set(found)


def test_what_is_kept_in_the_shells_code_comes_from_the_parsers() -> None:
    assert set(taken()) == set(VERBS)
    assert {"--against", "--threshold", "--json"} <= set(taken()["report"])
    assert "--rank" in taken()["logs"]
    assert "--rank" not in taken()["report"]
    text = completion.script("bash", "zlab", taken())
    assert json.loads(text.partition("--taken '")[2].partition("'")[0]) == taken()


def test_labels_come_from_the_plan_of_the_named_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("first", "second"):
        points = [Planned(f"{name}-{number}", (), RunState.queued) for number in (0, 1)]
        open_sweep(tmp_path, name, points, {"command": []})
    for sweep, label in (("last", "second"), ("first", "first")):
        line = f"zlab logs --output {tmp_path} {sweep} "
        assert command.main(["--line", line, "--taken", json.dumps(taken())]) == 0
        assert capsys.readouterr().out.splitlines() == [f"{label}-0 ", f"{label}-1 "]


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_each_shell_gets_code_without_placeholders(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([shell]) == 0
    code = capsys.readouterr().out
    assert "--line" in code
    for name in ("PROGRAM", "TAKEN", "NAMES", "REGISTER"):
        assert name not in code


# Each shell runs the code that it is given, on a line that is typed in the root of the project. Bash and zsh get the
# variables that they set for the function of a completion; zsh also a compadd that prints, as the real one works only
# within its line editor. Fish can be asked for the completions of a line.
ASKED = {
    "bash": """{code}
        COMP_WORDS=({quoted}); COMP_CWORD={last}; COMP_LINE='{line}'; COMP_POINT=${{#COMP_LINE}}; _zlab
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """,
    "zsh": """
        compdef() {{ }}
        _files() {{ print -l -- README* }}
        _default() {{ _files }}
        compadd() {{
            local end=" "
            if [[ $1 == -S ]]; then end=$2; shift 2; fi
            shift
            printf "%s$end\\n" "$@"
        }}
        {code}
        words=({quoted}); CURRENT={last}+1; LBUFFER='{line}'; _zlab
    """,
    "fish": """
        {code}
        complete -C '{line}'
    """,
}


def completed_by(shell: str, *words: str) -> list[str]:
    """What the shell offers after the words, the last of which is being typed."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    program = [sys.executable, "run.py"]
    asked = [*program, "completion", shell]
    code = subprocess.run(asked, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    typed = [*program, *words]
    text = ASKED[shell].format(
        code=code, line=" ".join(typed), quoted=" ".join(f"'{word}'" for word in typed), last=len(typed) - 1
    )
    bare = {"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]
    done = subprocess.run([shell, *bare, "-c", text], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_the_shell_completes_options_flags_and_else_files(shell: str) -> None:
    lists = completed_by(shell, "zero=stage1,stage")
    assert lists == [f"{'' if shell == 'bash' else 'zero='}stage1,stage{n}" for n in (0, 2, 3)]
    assert completed_by(shell, "report", "--ag") == ["--against" if shell == "fish" else "--against "]
    to = ["deepspeed", "ddp"]
    expected = sorted(to) if shell == "fish" else [f"{name} " for name in to]
    assert completed_by(shell, "export", "zero=stage3", "--to", "d") == expected
    files = completed_by(shell, "import", "READ")
    assert files == (
        [""] if shell == "bash" else ["README.md"]
    )  # bash itself then completes files: complete -o default


def test_completing_a_word_imports_nothing_that_runs_points() -> None:
    heavy = ("torch", "hydra", "rich", "orchestrator.commands.line", "orchestrator.commands.verbs")
    program = (
        "import sys; from orchestrator.cli import main; main(['completion', '--line', 'zlab zero=']); "
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "[]"
