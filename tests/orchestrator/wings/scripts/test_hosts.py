"""`zlab launch --hostfile` starts ranks over ssh, here to two addresses of this machine, and ends all by name."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from orchestrator.machine.processes import started
from tests.harness.patience import wait_until

ROOT = Path(__file__).resolve().parents[4]
# Trains on both ranks; with "hold" they wait, once both have met, to be ended.
SCRIPT = r"""
import os, sys, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank, folder = dist.get_rank(), sys.argv[2]
weight = torch.zeros(2, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.25)
for step in range(4):
    (weight - torch.tensor([1.0, 3.0])[rank]).square().sum().backward()
    dist.all_reduce(weight.grad)
    weight.grad /= 2
    optimizer.step()
    optimizer.zero_grad()
names = [os.environ[name] for name in ("GROUP_RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "FROM_FILE")]
print(weight[0].item(), *names, os.getcwd(), flush=True)
if sys.argv[1] == "hold":
    with open(f"{folder}/pid{rank}.part", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"{folder}/pid{rank}.part", f"{folder}/pid{rank}")
    time.sleep(600)
dist.barrier()
dist.destroy_process_group()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def ssh_config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The configuration with which ssh reaches a server of this module's own, at 127.0.0.1 and 127.0.0.2."""
    server = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if server is None or shutil.which("ssh") is None:
        pytest.skip("no sshd on this machine: apt-get install openssh-server")
    folder, port = tmp_path_factory.mktemp("ssh"), free_port()
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    for name in ("host", "own"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    lines = ["ListenAddress 127.0.0.1", "ListenAddress 127.0.0.2", f"Port {port}", f"HostKey {folder}/host"]
    lines += [f"AuthorizedKeysFile {folder}/own.pub", "StrictModes no", "UsePAM no", "PidFile none", "LogLevel ERROR"]
    (folder / "sshd_config").write_text("\n".join(lines) + "\n", encoding="utf-8")
    own = [f"Port {port}", f"User {getpass.getuser()}", f"IdentityFile {folder}/own", "IdentitiesOnly yes"]
    own += [f"UserKnownHostsFile {folder}/known", "StrictHostKeyChecking no", "LogLevel ERROR"]
    (folder / "config").write_text("\n".join(own) + "\n", encoding="utf-8")
    process = subprocess.Popen([server, "-D", "-e", "-f", folder / "sshd_config"])
    try:
        wait_until(lambda: answers(port) or process.poll() is not None)
        yield folder / "config"
    finally:
        process.terminate()
        process.wait()


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.2", port)) == 0


def launched(
    folder: Path, config: Path, how: str, hosts: str = "127.0.0.1 slots=1\n127.0.0.2 slots=1\n"
) -> subprocess.Popen[str]:
    work = folder / "a folder"
    work.mkdir()
    (work / "script.py").write_text(SCRIPT, encoding="utf-8")
    (work / "hosts").write_text(hosts, encoding="utf-8")
    (work / ".deepspeed_env").write_text("# for all\nFROM_FILE=it's = one\n", encoding="utf-8")
    words = ["--hostfile", "hosts", "--device", "cpu", "--master_port", str(free_port())]
    words += ["--launcher_args", f"-F {config}", "script.py", how, str(folder)]
    return subprocess.Popen(
        [sys.executable, str(ROOT / "run.py"), "launch", *words],
        cwd=work,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        start_new_session=True,
    )


def test_two_hosts_train_together(tmp_path: Path, ssh_config: Path) -> None:
    out, err = launched(tmp_path, ssh_config, "train").communicate()
    # Each step halves the distance to 2, the mean of both targets: 2 - 2 / 2**4.
    lines = [f"1.875 {host} 0 2 127.0.0.1 it's = one {tmp_path / 'a folder'}" for host in (0, 1)]
    assert sorted(out.splitlines()) == [lines[0], f"rank 1: {lines[1]}"], err
    assert "note: 2 ranks of script.py ended with exit code 0" in err


def pids_of(folder: Path, process: subprocess.Popen[str]) -> list[int]:
    """The ranks of a script that holds, once both are there."""
    files = [folder / f"pid{rank}" for rank in (0, 1)]
    wait_until(lambda: all(file.exists() for file in files) or process.poll() is not None)
    return [int(file.read_text()) for file in files]


@pytest.mark.parametrize(
    ("how", "code", "told"),
    [
        ("connection", 1, "error: rank 1: the connection ended with SIGKILL, on 127.0.0.2 (its ranks: 1)"),
        ("interrupt", 130, ""),
        ("launcher", -signal.SIGKILL, ""),
        ("rank", 1, "error: rank 1 was killed by SIGKILL, on 127.0.0.2 (its ranks: 1)"),
    ],
)
def test_no_rank_is_left_on_any_host(tmp_path: Path, ssh_config: Path, how: str, code: int, told: str) -> None:
    process = launched(tmp_path, ssh_config, "hold")
    ranks = pids_of(tmp_path, process)
    if how == "connection":
        (second,) = [one for one in psutil.Process(process.pid).children() if "127.0.0.2" in one.cmdline()]
        second.kill()
    elif how == "rank":
        os.kill(ranks[1], signal.SIGKILL)
    else:
        process.send_signal(signal.SIGINT if how == "interrupt" else signal.SIGKILL)
    _, err = process.communicate()
    assert process.returncode == code
    assert told in err
    wait_until(lambda: not any(map(started, ranks)))


def test_a_host_that_does_not_answer_is_named(tmp_path: Path, ssh_config: Path) -> None:
    process = launched(tmp_path, ssh_config, "hold", "127.0.0.1 slots=1\n127.0.0.3 slots=2\n")
    _, err = process.communicate()
    assert process.returncode == 1
    assert "error: rank 1: the connection ended with exit code 255: ssh: connect to host 127.0.0.3 port" in err
    assert ", on 127.0.0.3 (its ranks: 1, 2), after" in err
