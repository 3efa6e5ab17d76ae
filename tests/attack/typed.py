"""Runs typed command lines in this process and checks the exit code and the output.

Everything after the checks is left out: the run of a point, the controller and the reading of a checkpoint. Tools of
GPUs and clusters are missing, and the process that counts activations gives the same answer for every model.
Everything before that is the product's own code.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import pytest
import yaml
from trials import Trial, Wrong

from orchestrator import cli
from orchestrator.commands import doctor, sync
from orchestrator.commands import run as study
from orchestrator.commands import sweep as sweep_command
from orchestrator.compose import compose, folders
from orchestrator.compose.composition import Composed
from orchestrator.config.schema import from_dict, to_dict
from orchestrator.machine import hardware
from orchestrator.planning.point import Point
from orchestrator.report.screen import Screen, make_console
from orchestrator.text.paths import program
from orchestrator.wings.foreign import export_weights as export
from orchestrator.wings.page.charts import canvas
from orchestrator.wings.predict import calibrate, counting_child, fit, memory_cache
from orchestrator.wings.predict.tensor_messages import TensorMessages
from orchestrator.wings.scripts import launch_script
from orchestrator.wings.scripts.script_ranks import ScriptEnd
from zero_runtime.predict.memory.activation_count import LinearTrace, Mark, Trace
from zero_runtime.predict.timing.segments import SegmentTable
from zero_runtime.predict.timing.work import LinearWork
from zero_runtime.same_host import probe

# Allowed beginnings of lines on stderr: any other line comes from a message with a line break in it.
LINES = ("error: ", "nothing was started (exit 2)", "refused: ", "note: ", "warning: ", "== ", "in /")
LINE_SIGNS = 6000  # characters of one line at most, whatever was typed
ALL_SIGNS = 60_000
CODES = (0, 1, 2, 3, 4)
TEXTS = {"--help", "-h", "--version", "--cfg", "-c", "--info", "-i", "--hydra-help", "-sc"}  # text even with --json
TOOLS = ("nvidia-smi", "sbatch", "sinfo", "squeue", "sacct", "scontrol", "scancel", "git")
RUN, LOAD, READ = subprocess.run, yaml.load, compose.read_yaml
_READ: dict[Path, Any] = {}
_LOADED: dict[tuple[str, type], Any] = {}
PRECISION = {"param": "bf16", "reduce": "bf16", "accumulate": "fp32", "master": "fp32", "compute": "bf16"}
SHAPES = [["weight", [64, 32]], ["bias", [64]]]
UNITS = {
    "units": [
        {
            "name": name,
            "shapes": SHAPES,
            "numel": 64 * 33,
            "trainable": True,
            "is_root": root,
            "precision": PRECISION,
            "offloaded": not root,
        }
        for name, root in (("root", True), ("block", False))
    ],
    "state_bytes": 8,
    "block_numel": 1,
    "buffer_bytes": 0,
    "tensor": TensorMessages().plain(),
}
ACTIVATIONS = {
    "bytes": {"kept": 1 << 20, "kept_outside": 1 << 18, "peak": 1 << 21, "peak_outside": 1 << 18, "peak_backward": 1}
}
MICROS = (1, 1 << 40)  # of the trace
TRACE = LinearTrace(
    Trace([1 << 21], [True], [False], [1, -1], [(0, Mark.BEFORE_FORWARD, 0), (1, Mark.GRADIENT, 0)], forward_end=1),
    [1 << 10],
    *MICROS,
)
WORK = LinearWork(*MICROS, SegmentTable({}), SegmentTable({}))
POINTS = 12  # limit of a sweep here: each costs milliseconds
ROWS = math.prod(len(options.split(",")) for options in fit.AXES.values())  # that fit and choose compose themselves
# These must not be imported; code that searches the current folder first would import them.
CANARIES = ("queue", "torch", "yaml", "zlab_canary")
CANARY = 'open("imported", "w").close()\ndef go(*words, **named): open("called", "w").close()\n'


class Answer(NamedTuple):
    code: int
    out: str
    err: str


class Typist:
    """Runs command lines in the folder `home`/work, with `outputs` in it as the output folder."""

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.work, self.home = home / "work", home
        self.output = self.work / "outputs"
        for folder in (self.work, self.output, home / "cache", home / "locks"):
            folder.mkdir(mode=0o700)
        self.points = 0  # points composed for the last line
        for name in CANARIES:
            (self.work / f"{name}.py").write_text(CANARY)
        probe.trouble()  # which starts two processes, once: here, where nothing is watched yet
        monkeypatch.chdir(self.work)
        for name, value in (
            *(("HOME", home), ("XDG_CACHE_HOME", home / "cache"), ("ZLAB_LOCKS", home / "locks")),
            *(("TMPDIR", home), ("COLUMNS", 100)),
        ):
            monkeypatch.setenv(name, str(value))
        for name in ("RANK", "WORLD_SIZE", "MLFLOW_TRACKING_URI", "ZLAB_OUTPUT", "ZLAB_FAULT", "CUDA_VISIBLE_DEVICES"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(yaml, "load", _loaded_once)
        monkeypatch.setattr(compose, "read_yaml", _read_once)
        self._leave_out_what_starts(monkeypatch)

    def _leave_out_what_starts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(hardware, "_ask_nvidia_smi", list)
        monkeypatch.setattr(hardware, "_smi", lambda query: [])
        monkeypatch.setattr(doctor, "loopback", lambda: "127.0.0.1")
        monkeypatch.setattr(counting_child.Counting, "answers", _counted)
        monkeypatch.setattr(counting_child, "Child", _no_child)  # which fit starts before it reads its words
        monkeypatch.setattr(calibrate.rank_job, "run", _no_ranks)  # which `choose` and `calibrate` measure with
        monkeypatch.setattr(sync, "start_sync", _nothing_missing)
        monkeypatch.setattr(subprocess, "run", _no_tool)
        # matplotlib takes a second; odd numbers in pictures: wings/page/test_figures.py.
        monkeypatch.setattr(canvas, "png", lambda pictures, factor: b"")
        monkeypatch.setattr(canvas, "_shapes", lambda picture: "</svg>")
        monkeypatch.setattr(study, "run_point", _recorded)
        monkeypatch.setattr(export, "_export", lambda path, out, dtype: None)
        monkeypatch.setattr(launch_script, "run_script", lambda command, placement: ScriptEnd())
        monkeypatch.setattr(launch_script, "run_on_hosts", lambda slots, asked: ScriptEnd())
        monkeypatch.setattr(sweep_command, "_begin", lambda *words: SimpleNamespace(sweep=None))
        monkeypatch.setattr(sweep_command, "_followed", lambda *words, **settings: 0)
        one_point = compose.Composer.point

        def counted(composer: compose.Composer, line: list[str]) -> Composed:
            self.points += 1
            return one_point(composer, line)

        monkeypatch.setattr(compose.Composer, "point", counted)

    def type(self, trial: Trial, words: Sequence[str]) -> Answer:
        """Runs the line and returns its answer, after a check of exit code, output, written files and imports."""
        self.points = 0
        places = [self.output, self.home / "cache", self.home / "locks"]
        out, err = _Stream(), _Stream()
        with _restored(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = trial.watched(lambda: _code(words), may_write=places)
        answer = Answer(code, out.text(), err.text())
        _judge(answer, words)
        for name in ("imported", "called"):
            if (self.work / name).exists():
                (self.work / name).unlink()
                raise Wrong("imported", f"code in the current folder was {name}")
        return answer


class _Stream(io.TextIOWrapper):
    """As a terminal's in a UTF-8 locale: it refuses text that it cannot encode, unless the product asks otherwise."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", write_through=True, newline="\n")

    def text(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode("utf-8", errors="surrogateescape")  # type: ignore[attr-defined]


def _code(words: Sequence[str]) -> int:
    try:
        return cli.main(words)
    except SystemExit as end:  # from --help and Hydra's information options
        if not isinstance(end.code, int | None):
            raise
        return end.code or 0


def _judge(answer: Answer, words: Sequence[str]) -> None:
    screen = f"exit code {answer.code}\n{answer.err[-2000:]}"
    if answer.code not in CODES:
        raise Wrong("wrong exit codes", screen)
    for line in (lines := answer.err.split("\n")[:-1]):
        if not line.startswith((*LINES, f"{program()} ")) and not _is_progress(line, answer.code):
            raise Wrong("unclear messages", f"a line without a known beginning: {line[:300]!r}\n{screen}")
        if len(line) > LINE_SIGNS or not line.isprintable():
            raise Wrong("unclear messages", f"{len(line)} signs, or signs that steer a terminal: {line[:300]!r}")
    told = [line for line in lines if line.startswith("error: ")]
    if answer.code == 2 and not told and "error: " not in answer.out:
        raise Wrong("unclear messages", f"exit code 2 and no line that says why\n{screen}")
    if len(told) != len(set(told)) or len(answer.err) > ALL_SIGNS:
        raise Wrong("unclear messages", f"the same line twice, or {len(answer.err)} signs\n{screen}")
    if "--json" in words and not set(words) & TEXTS and answer.out and not _is_json(answer.out):
        raise Wrong("unclear messages", f"--json and no one document: {answer.out[:300]!r}")


def _is_progress(line: str, code: int) -> bool:
    """Whether the line may be progress of a plan, which --json prints to stderr, if nothing is wrong; `choose` counts
    and measures before it finds that no speed can be predicted and that no run has a result."""
    known = r"[\d,]+ (combination|point)s?: |measured [\d,]+ parts|confirming [\d,]+ candidate"
    return line.isprintable() and (code == 0 or re.match(known, line) is not None)


def _is_json(text: str) -> bool:
    with contextlib.suppress(ValueError):
        json.loads(text)
        return True
    return False


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    """Restores what a command may change in its own process, which here is the test's."""
    folder, argv, path, umask = os.getcwd(), list(sys.argv), list(sys.path), os.umask(0o022)
    handlers, level = logging.root.handlers[:], logging.root.level  # Hydra sets up its own when it shows information
    try:
        yield
    finally:
        os.chdir(folder)
        sys.argv, sys.path[:] = argv, path
        os.umask(umask)
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)


def _recorded(point: Point, *, as_json: bool, admission: object) -> int:
    """Does only what a run does first: shows its plan and writes out the configuration."""
    screen = Screen(make_console(on_stderr=as_json))
    screen.plan(point.label, point.config, "folder")
    print(json.dumps(to_dict(point.config)))
    return 0


def _no_ranks(*words: object, **settings: object) -> dict[str, Any]:
    return {"answers": {}, "others_share": None}  # ranks that had no time to measure anything


def _no_child() -> NoReturn:
    raise OSError


def _nothing_missing(*words: object, **named: object) -> SimpleNamespace:
    """The process of a sync that had nothing to write."""
    return SimpleNamespace(stdout=[], poll=lambda: 0, wait=lambda: 0, returncode=0)


def _counted(counting: counting_child.Counting) -> Iterator[tuple[str, Any]]:
    """What the child process would answer for one small model."""
    asked = counting._asked
    yield from ((key, UNITS) for key in asked["units"])
    for family in asked["activations"]:
        place = memory_cache.trace_key([from_dict(one) for one in family.values()], *MICROS)
        yield place, {"linear": TRACE.plain(), "work": WORK.plain()}
        yield from ((key, ACTIVATIONS | {"trace": place}) for key in family)


def _loaded_once(stream: Any, Loader: type) -> Any:
    """yaml.load, but each shipped file is parsed only once, since parsing takes most of the time of a line."""
    is_shipped = isinstance(stream, str) or str(getattr(stream, "name", "")).startswith(str(folders.CONF))
    if not is_shipped:
        return LOAD(stream, Loader)
    text = stream if isinstance(stream, str) else stream.read()
    if (text, Loader) not in _LOADED:
        if isinstance(stream, str) and text not in _shipped():
            return LOAD(stream, Loader)
        _LOADED[text, Loader] = LOAD(text, Loader)
    return copy.deepcopy(_LOADED[text, Loader])


def _read_once(path: Path) -> Any:
    """compose.read_yaml, but each shipped file is read only once."""
    if not path.is_relative_to(folders.CONF):
        return READ(path)
    if path not in _READ:
        _READ[path] = READ(path)
    return _READ[path]


@cache
def _shipped() -> frozenset[str]:
    return frozenset(path.read_text(encoding="utf-8") for path in folders.CONF.rglob("*.yaml"))


def _no_tool(words: Sequence[str], **named: Any) -> Any:
    """subprocess.run, but the tools that describe the machine are missing; nothing else should be started."""
    if words[0] in TOOLS:
        raise FileNotFoundError(2, "no such tool here", words[0])
    return RUN(words, **named)
