"""An MLflow server on PostgreSQL, on the loopback interface, that can be stopped and started again.

python tests/harness/mlflow_server.py FOLDER [PORT] runs one until Ctrl-C, with its data in FOLDER. It needs Debian's
package postgresql, or another PostgreSQL whose programs are on the PATH, and pip install 'zero-lab[postgres]'.
"""

from __future__ import annotations

import glob
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

READY_S = 120.0
USER = "zlab"  # of the database; only this machine reaches it


def program(name: str) -> str | None:
    """A program of PostgreSQL; Debian keeps them outside the PATH."""
    newest = sorted(glob.glob(f"/usr/lib/postgresql/*/bin/{name}"))
    return shutil.which(name) or (newest[-1] if newest else None)


def why_not() -> str:
    """Why there can be no server here; empty if there can."""
    if program("initdb") is None or program("postgres") is None:
        return "no PostgreSQL on this machine: apt-get install postgresql"
    try:
        import psycopg  # noqa: F401
    except ImportError:
        return "no driver of PostgreSQL: pip install 'zero-lab[postgres]'"
    return ""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class MlflowServer:
    """PostgreSQL and MLflow's server on it, with everything in one folder. address: the value of tracking.uri.
    database: the address of the database itself."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        self.folder, self.port, self._database_port = folder, port or free_port(), free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        self.database = f"postgresql+psycopg://{USER}@127.0.0.1:{self._database_port}/postgres"
        self._processes: list[subprocess.Popen[bytes]] = []
        # PostgreSQL refuses to run as root.
        self._user = "postgres" if os.geteuid() == 0 else None
        self._data = folder / "postgres"

    def start_database(self) -> None:
        """Returns when the database answers. Makes it the first time."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self._data.exists():
            self._data.mkdir(mode=0o700)
            if self._user is not None:
                os.chown(self._data, pwd.getpwnam(self._user).pw_uid, -1)
            words = [str(program("initdb")), "--auth=trust", f"--username={USER}", "--pgdata", str(self._data)]
            subprocess.run(words, check=True, user=self._user, cwd="/", stdout=subprocess.DEVNULL)
        words = [str(program("postgres")), "-D", str(self._data), "-p", str(self._database_port)]
        words += ["-h", "127.0.0.1", "-k", ""]  # no socket in a folder that only its package can write to
        self._start(words, "postgres.log", self._user)
        self._await(lambda: socket.create_connection(("127.0.0.1", self._database_port), 1).close())

    def start(self) -> None:
        """Returns when MLflow's server answers."""
        if not self._processes:
            self.start_database()
        words = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", self.database]
        words += ["--artifacts-destination", (self.folder / "artifacts").as_uri()]
        words += ["--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        self._start(words, "mlflow.log")
        self._await(lambda: urllib.request.urlopen(f"{self.address}/health", timeout=2).read())

    def _start(self, words: list[str], log: str, user: str | None = None) -> None:
        quiet = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
        quiet["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"
        self._log = self.folder / log
        with self._log.open("ab") as file:
            process = subprocess.Popen(
                words, cwd="/", env={**os.environ, **quiet}, stdout=file, stderr=file, user=user, start_new_session=True
            )
        self._processes.append(process)

    def _await(self, answers: Callable[[], object]) -> None:
        deadline = time.monotonic() + READY_S
        while True:
            try:
                answers()
                return
            except OSError:  # noqa: PERF203
                status, said = self._processes[-1].poll(), self._log.read_text(errors="replace")[-4000:]
                assert status is None, f"it ended by itself with exit status {status}; {self._log} ends:\n{said}"
                assert time.monotonic() < deadline, f"no answer within {READY_S:g} s: see {self.folder}"
                time.sleep(0.1)

    def stop(self) -> None:
        """Stops MLflow's server; the database goes on."""
        self._end(self._processes.pop(), signal.SIGKILL)

    def close(self) -> None:
        """Stops both."""
        while self._processes:
            self._end(self._processes.pop(), signal.SIGINT if not self._processes else signal.SIGKILL)

    def _end(self, process: subprocess.Popen[bytes], by: signal.Signals) -> None:
        if process.poll() is None:
            os.killpg(process.pid, by)
        process.wait()


def main(argv: list[str]) -> int:
    if problem := why_not():
        print(problem, file=sys.stderr)
        return 2
    server = MlflowServer(Path(argv[0]).absolute(), int(argv[1]) if len(argv) > 1 else 5000)
    try:
        server.start()
        print(f"tracking.uri={server.address}     or: export MLFLOW_TRACKING_URI={server.address}     Ctrl-C ends it")
        signal.pause()
    except KeyboardInterrupt:
        pass
    finally:
        server.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
