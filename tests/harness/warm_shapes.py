"""The child process that counts shapes and activations, as a fork of the warm fork server: it imports nothing again."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import sys
from multiprocessing.reduction import DupFd
from typing import IO, Any, TextIO


class WarmShapes:
    """What counting_child.py uses of the process that it starts: its pipes, `kill` and `wait`."""

    def __init__(self, stderr: IO[bytes]) -> None:
        asked, stdin = os.pipe()
        stdout, answers = os.pipe()
        self.stdin: TextIO = os.fdopen(stdin, "w", encoding="utf-8")
        self.stdout: TextIO = os.fdopen(stdout, encoding="utf-8")
        self._process = _Process(asked, answers, stderr.fileno())
        self._process.start()
        os.close(asked)
        os.close(answers)
        self.kill = self._process.kill

    def wait(self) -> int:
        self._process.join()
        return self._process.exitcode or 0

    def __enter__(self) -> WarmShapes:
        return self

    def __exit__(self, *_: object) -> None:
        self.stdin.close()
        self.wait()


class _Process(mp.get_context("forkserver").Process):  # type: ignore[name-defined,misc]
    """Holds the ends of the pipes as numbers until it is started, when they can be sent to the fork server."""

    def __init__(self, *ends: int) -> None:
        super().__init__(daemon=False)  # a daemon may have no forks of its own
        self._ends = ends  # its stdin, stdout and stderr

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ends": tuple(DupFd(end) for end in self._ends)}

    def run(self) -> None:
        from orchestrator.wings.predict import shapes

        for target, end in enumerate(self._ends):
            os.dup2(end.detach(), target)
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115  as long as the process lives
        shapes.main(json.load(sys.stdin))
