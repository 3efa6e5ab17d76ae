"""Under small limits and in unusual environments a command runs, or reports in one line what stops it; nothing is lost,
and without the limit the same command resumes."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from harness.attack_counts import Tally
from harness.patience import HANG_S, wait_until
from points import TINY
from sweep_runs import left_behind
from test_full_disk import COMMAND

from orchestrator.records import sweep_record

HERE = Path(__file__).parent
DOCUMENTED = (0, 1, 2, 3)


@dataclass(frozen=True)
class Surrounding:
    """How a command is started. `limits`: values of `resource.RLIMIT_...`, by name. `shell`: the shell line that runs
    the command, which is "$@" in it. `environ`: variables to set, None for one to unset. `codes`: the permitted exit
    codes. `whats`: the commands to start, "sweep", "single" (one run) or both."""

    limits: dict[str, int] = field(default_factory=dict)
    shell: str = '"$@"'
    environ: dict[str, str | None] = field(default_factory=dict)
    codes: tuple[int, ...] = DOCUMENTED
    whats: tuple[str, ...] = ("sweep",)


def limited(**limits: int) -> Surrounding:
    return Surrounding(limits, whats=("sweep", "single"))


def shell(text: str, *codes: int) -> Surrounding:
    return Surrounding(shell=text, codes=codes or (0,))


def environ(**values: str | None) -> Surrounding:
    return Surrounding(environ=values, codes=(0,))


SURROUNDINGS = {
    **{f"{count} open files": limited(NOFILE=count) for count in (32, 8, 4)},
    **{f"files of {size} bytes": limited(FSIZE=size) for size in (20_000, 1000, 0)},
    **{f"{mib} MiB of addresses": limited(AS=mib << 20) for mib in (96, 64)},
    "no more processes": limited(NPROC=0),
    "no core files and a small stack": Surrounding({"CORE": 0, "STACK": 256 << 10}, codes=(0,)),
    "no stdin": shell('"$@" <&-'),
    "no stdout": shell('"$@" >&-'),
    "no stream": shell('"$@" <&- >&- 2>&-'),
    "a full stdout": shell('"$@" >/dev/full', 1),
    "full streams": shell('"$@" >/dev/full 2>&1', 1),
    "a reader that went away": shell('"$@" | true', 0, 1),
    "umask 777": shell('umask 777; "$@"', *DOCUMENTED),
    "signals ignored": shell('trap "" HUP TERM INT PIPE; "$@"'),
    "nothing of a user": environ(HOME=None, USER=None, LOGNAME=None, XDG_CACHE_HOME=None, PATH="/nowhere"),
    # Nobody can make a folder in /proc: elsewhere root could, and libraries such as matplotlib would.
    "folders that are not there": environ(HOME="/proc/no/home", TMPDIR="/proc/no/tmp", XDG_CACHE_HOME="/proc/no"),
    "folders that are files": environ(HOME="/etc/passwd", TMPDIR="/etc/passwd", XDG_CACHE_HOME="/etc/passwd/cache"),
    "folders without names": environ(HOME="", TMPDIR="", XDG_CACHE_HOME=""),
    "a locale of 1980": environ(LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0"),
    "a locale that is not there": environ(LC_ALL="xx_YY.nonsense", LANG="tr_TR.ISO-8859-9", PYTHONIOENCODING="koi8-r"),
    "an odd terminal": environ(COLUMNS="-3", LINES="many", TERM="nonsense", TZ="Nowhere/Nothing"),
    "a rank's variables": environ(OMP_NUM_THREADS="x", CUDA_VISIBLE_DEVICES="x", GLOO_SOCKET_IFNAME="nope"),
}
CASES = [(name, what) for name, around in SURROUNDINGS.items() for what in around.whats]


def run(what: str, output: Path, around: Surrounding, cwd: Path) -> tuple[int, str]:
    """The exit code of a command with the stub worker, and all output of the command and its controllers."""
    path = [str(HERE), str(HERE.parent), str(HERE.parents[1])]
    lines = [f"resource.setrlimit(resource.RLIMIT_{name}, ({value}, {value}))" for name, value in around.limits.items()]
    text = "\n".join(["import resource", *lines, COMMAND.format(path=path, output=str(output), what=what)])
    wanted = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "STUB_STEP_S": "0.0", **around.environ}
    wanted |= {"PYTHONUNBUFFERED": ""}  # a machine that sets it hides what Python's buffers do at the end
    done = subprocess.run(
        ["/bin/sh", "-c", around.shell, "sh", sys.executable, "-c", text],
        cwd=cwd,
        env={key: value for key, value in wanted.items() if value is not None},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=HANG_S,
        check=False,
    )
    logs = [log.read_text(errors="replace") for log in output.glob("sweeps/*/controller.log")]
    return done.returncode, "".join([done.stdout, done.stderr, *logs])


@pytest.mark.full
@pytest.mark.parametrize(("name", "what"), CASES)
def test_a_command_runs_or_reports_why_not_and_resumes_without_the_limit(
    name: str, what: str, tmp_path: Path, tally: Tally
) -> None:
    output, around = tmp_path / "outputs", SURROUNDINGS[name]
    if "NPROC" in around.limits and os.getuid() == 0:
        pytest.skip("the limit of processes does not hold for root")
    code, told = run(what, output, around, tmp_path)
    print(code, told)
    assert code in around.codes, told
    assert "Traceback" not in told, told
    assert code == 0 or "error" in told or around.shell.endswith(("2>&1", "| true")), told
    wait_until(lambda: left_behind(output) == [])  # a controller notices a moment later that its command has ended
    results = {path: path.read_bytes() for path in output.glob("points/*/attempts/*/result.json")}
    again, told = run(what, output, Surrounding(), tmp_path)
    assert again == 0, told
    assert {path: path.read_bytes() for path in results} == results
    assert not [*tmp_path.rglob(".*.tmp")]
    if what == "sweep":
        (sweep, *_) = sweep_record.all_sweeps(output)
        assert all(one.state.measured for one in sweep_record.standings(sweep))
    tally("limits and surroundings", commands=2, tracebacks=0, wrong_exit_codes=0, results_lost=0, processes_left=0)


@pytest.mark.full
def test_ranks_train_with_a_dev_shm_of_one_page(tmp_path: Path) -> None:
    inside = 'mount -t tmpfs -o size=4k none /dev/shm && exec "$@"'
    ways = (["unshare", "--mount"], ["unshare", "--mount", "--map-root-user"])
    words = ("sh", "-c", inside, "sh")
    way = next((one for one in ways if not subprocess.run([*one, *words, "true"], check=False).returncode), None)
    if way is None:
        pytest.skip("no /dev/shm of its own can be mounted here: unshare --mount is not allowed")
    line = [sys.executable, str(HERE.parents[1] / "run.py"), *TINY.replace("ranks=1", "ranks=2").split()]
    done = subprocess.run([*way, *words, *line], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
