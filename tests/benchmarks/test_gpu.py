"""`make gpu` tries every claim in order and within its limit, goes past failures, and says what became of each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from harness.exact import hybrid_rows, rows_of
from harness.outcomes import HASTY
from harness.patience import HANG_S
from harness.rank_scenarios import BAD_RANK, closed_again_and_again, exact_rows, out_of_memory_on_one_rank
from harness.spawned import spawn_ranks, values_of

from benchmarks import gpu
from benchmarks.gpu import CONFIRMED, NOT_REACHED, REFUTED, Outcome, try_all
from benchmarks.gpu_claims import CLAIMS, Claim
from zero_runtime.predict.memory.device_overhead import COMMUNICATOR, CONTEXT

ROOT = Path(__file__).resolve().parents[2]
NOT_NEEDED = (
    "orchestrator",
    "transformers",
    "hydra",
    "omegaconf",
    "mlflow",
    "submitit",
    "psutil",
    "yaml",
    "rich",
    "peft",
)


def claim(name: str, code: str, *, limit_s: float = HANG_S, gpus: int = 1, **variables: str) -> Claim:
    return Claim(name, f"{name} works", (sys.executable, "-c", code), limit_s, gpus, variables)


# A shell, which starts in a millisecond: its limit is waited for, and must hold on a busy machine.
HANGS = ("sh", "-c", "printf 'hangs ' >> order; sleep 600 & echo $! > child; wait")
TRIED = (
    claim("good", "import os; open('order', 'a').write('good '); print(os.environ['FLAG'])", FLAG="set"),
    claim("bad", "open('order', 'a').write('bad '); raise ValueError('7 is not 8')"),
    Claim("hangs", "hangs works", HANGS, 1.5, 1, {}),
    claim("killed", "import os; open('order', 'a').write('killed '); os.abort()"),
    claim("lacks", "import sys; open('order', 'a').write('lacks '); print('no such package'); sys.exit(2)"),
    claim("many", "open('order', 'a').write('many ')", gpus=8),
    claim("last", "open('order', 'a').write('last ')"),
)


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Outcome], list[str], Path]:
    folder, said = tmp_path_factory.mktemp("gpu"), list[str]()
    return try_all(TRIED, 2, said.append, folder), said, folder


Tried = tuple[list[Outcome], list[str], Path]


def test_claims_are_tried_in_order_and_one_that_fails_or_hangs_stops_no_other(tried: Tried) -> None:
    outcomes, _, folder = tried
    assert (folder / "order").read_text().split() == ["good", "bad", "hangs", "killed", "lacks", "last"]
    assert [outcome.verdict for outcome in outcomes] == [
        *(CONFIRMED, REFUTED, REFUTED, REFUTED, NOT_REACHED, NOT_REACHED, CONFIRMED)
    ]
    assert [outcome.reason for outcome in outcomes] == [
        "",
        "exit code 1: ValueError: 7 is not 8",
        "did not end within its limit",
        "exit code -6: no output",
        "no such package",
        "needs 8 GPUs, found 2",
        "",
    ]
    assert "set" in outcomes[0].tail


def test_claims_that_measure_no_time_run_at_once_and_before_those_that_do(tmp_path: Path) -> None:
    meets = "import os, time\nopen({own!r}, 'w')\nwhile not os.path.exists({other!r}): time.sleep(0.01)"
    claims = (
        replace(claim("alone", "import os; assert os.path.exists('a') and os.path.exists('b')"), timed=True),
        claim("one", meets.format(own="a", other="b")),
        claim("other", meets.format(own="b", other="a")),
    )
    outcomes = try_all(claims, 1, list[str]().append, tmp_path, together=2)
    assert [(one.claim.name, one.verdict) for one in outcomes] == [
        (name, CONFIRMED) for name in ("alone", "one", "other")
    ]


def test_no_process_of_a_claim_that_hangs_is_left(tried: Tried) -> None:
    child = int((tried[2] / "child").read_text())
    deadline = time.monotonic() + HANG_S
    while time.monotonic() < deadline:
        try:
            if "Z" in Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]:
                return
        except OSError:
            return
        time.sleep(0.05)
    raise AssertionError(f"process {child} is alive")


def test_each_claim_gets_a_line_with_its_verdict_and_a_refuted_one_the_end_of_its_output(tried: Tried) -> None:
    outcomes, said, _ = tried
    said = "\n".join(said).splitlines()
    lines = [line for line in said if line.startswith((CONFIRMED, REFUTED, NOT_REACHED))]
    assert [line.split()[:2] for line in lines] == [[outcome.verdict, outcome.claim.name] for outcome in outcomes]
    assert lines[1].endswith("bad works (exit code 1: ValueError: 7 is not 8)")
    assert any("    ValueError: 7 is not 8" in line for line in said)
    assert gpu.summary(outcomes) == "2 confirmed; 3 refuted (bad, hangs, killed); 2 unreached (lacks, many)"


def test_the_exit_code_tells_refuted_from_unreached_and_from_nothing_tried(tried: Tried) -> None:
    good, bad, *_, many, _ = tried[0]
    codes = [gpu.exit_code(some) for some in ([good], [good, bad, many], [many, many], [good, many])]
    assert codes == [0, 1, 2, 3]


def test_the_results_are_dated_and_hold_what_a_reader_needs(tried: Tried, tmp_path: Path) -> None:
    path = gpu.report(tried[0], tmp_path)
    assert path.name.startswith("gpu_20")
    table = path.read_text()
    assert "| bad | refuted |" in table
    assert "| `FLAG=set python -c" in table
    stored = json.loads(path.with_suffix(".json").read_text())
    assert [one["verdict"] for one in stored] == [outcome.verdict for outcome in tried[0]]
    assert "7 is not 8" in stored[1]["tail"]


@pytest.mark.full
def test_without_a_gpu_every_claim_is_unreached_at_once_and_nothing_is_written() -> None:
    before = set((ROOT / "benchmarks" / "results").iterdir())
    done = subprocess.run(
        [sys.executable, "benchmarks/gpu.py"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        timeout=HANG_S,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 2
    assert [line.split()[:2] for line in lines[:-1]] == [[NOT_REACHED, claim.name] for claim in CLAIMS]
    assert all(line.endswith("(no CUDA device)") for line in lines[:-1])
    assert lines[-1].startswith(f"0 confirmed; 0 refuted; {len(CLAIMS)} unreached")
    assert set((ROOT / "benchmarks" / "results").iterdir()) == before


def test_every_claim_has_a_name_of_its_own_and_a_command_that_exists() -> None:
    assert max(Counter(claim.name for claim in CLAIMS).values()) == 1
    for one in CLAIMS:
        assert one.expected
        assert 0 < one.limit_s <= 1200
        files = [word.partition("::")[0] for word in one.command if ".py" in word]
        assert files
        assert all((ROOT / file).is_file() for file in files), one
        tests = [word for word in one.command if "::" in word]
        assert all(f"def {word.partition('::')[2]}(" in (ROOT / word.partition("::")[0]).read_text() for word in tests)


LACKING = f"""
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {NOT_NEEDED!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
"""


def run_lacking(program: str) -> subprocess.CompletedProcess[str]:
    """Runs the program in a Python that has torch, numpy, safetensors and pytest, and none of NOT_NEEDED."""
    return subprocess.run(
        [sys.executable, "-c", LACKING + program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        timeout=HANG_S,
    )


@pytest.mark.full
def test_the_gpu_tests_are_collected_with_torch_numpy_safetensors_and_pytest_alone() -> None:
    done = run_lacking(
        "import pytest\n"
        "sys.exit(pytest.main(['--collect-only', '-q', '-p', 'no:cacheprovider', '-W', 'ignore', 'tests/gpu']))"
    )
    # Without a GPU all tests are left out after they were collected, which pytest calls "no tests collected" (5).
    assert done.returncode in (0, 5), done.stdout + done.stderr
    assert "error" not in done.stdout.lower()


def test_the_scripts_of_the_claims_are_imported_with_torch_numpy_and_safetensors_alone() -> None:
    scripts = {one.command[1] for one in CLAIMS if one.command[1].startswith("benchmarks/")}
    assert len(scripts) > 4
    done = run_lacking(f"import runpy\nfor script in {sorted(scripts)}: runpy.run_path(script)")
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_what_the_ranks_do_is_rehearsed_on_cpus() -> None:
    assert values_of(spawn_ranks(exact_rows, 2, rows_of(2)[:4], device="cpu")) == [[], []]
    assert values_of(spawn_ranks(closed_again_and_again, 2, 4, device="cpu")) == [4, 4]


@pytest.mark.full
def test_a_rank_out_of_memory_is_rehearsed_on_cpus() -> None:
    found = spawn_ranks(out_of_memory_on_one_rank, 3, device="cpu", watch=HASTY)
    bad = found.pop(BAD_RANK)
    assert (bad.how, bad.kind) == ("raised", "RankMemoryError"), bad
    assert all(other.blamed == (BAD_RANK,) and "out of memory" in other.text for other in found), found


def test_the_figures_of_rows_are_those_that_are_tried() -> None:
    expected = {claim.name: claim.expected for claim in CLAIMS}
    rows = [row for row in rows_of(8) if row.shard_ranks is None]
    assert len(rows) == len(rows_of(1))
    assert all(f"0 of {len(rows)} rows" in expected[name] for name in ("one-rank", "nccl"))
    assert f"0 of {len(hybrid_rows(8))} rows" in expected["hybrid"]
    allowance = (CONTEXT, COMMUNICATOR)
    ranges = [f"{least / 2**30:.2f} to {most / 2**30:.2f} GiB" for least, most in allowance]
    assert all(text in expected["overhead"] for text in ranges), ranges
