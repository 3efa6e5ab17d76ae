"""`zlab launch` takes the words of DeepSpeed's launcher: each works, or is refused by name."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.config.schema import Device
from orchestrator.config.strict import Refusal
from orchestrator.machine import hardware
from orchestrator.wings.scripts import launch_script
from orchestrator.wings.scripts.script_ranks import Placement, ScriptEnd, rank_environment

PRINTS = "import os, sys; print(os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'], *sys.argv[1:])\n"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    Path("train.py").write_text(PRINTS, encoding="utf-8")
    Path("two").write_text("# the cluster\nworker-0 slots=4\nworker-1 slots=2\n", encoding="utf-8")
    Path("one").write_text("this slots=2\n", encoding="utf-8")


def placed(words: str, monkeypatch: pytest.MonkeyPatch, gpus: int = 4) -> Placement:
    """What the words ask for on a machine with so many GPUs."""
    taken: list[Placement] = []
    found = replace(hardware.detect(), gpus=gpus)
    monkeypatch.setattr(hardware, "detect", lambda: found)
    monkeypatch.setattr(launch_script, "run_script", lambda _, placement: taken.append(placement) or ScriptEnd())
    assert launch_script.main(words.split()) == 0
    return taken[0]


@pytest.mark.parametrize(
    ("words", "ranks", "gpus"),
    [
        ("train.py", 4, None),
        ("--num_nodes 1 --num_gpus 2 train.py", 2, None),
        ("--include localhost:1,3 train.py", 2, "1,3"),
        ("-i localhost train.py", 4, "0,1,2,3"),
        ("--exclude localhost:0 train.py", 3, "1,2,3"),
        ("--hostfile one train.py", 2, "0,1"),
        ("--hostfile one --num_gpus 1 train.py", 1, "0"),
        ("-H two --num_nodes 1 train.py", 4, "0,1,2,3"),
        ("-H two -i worker-1:1 train.py", 1, "1"),
        ("-H one --device cpu train.py", 2, ""),
    ],
)
def test_words_that_choose_gpus_place_the_ranks(
    words: str, ranks: int, gpus: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = placed(words, monkeypatch)
    assert found.ranks == ranks
    assert rank_environment(found, 0, "localhost", 1, {}).get("CUDA_VISIBLE_DEVICES") == gpus


def test_a_module_a_program_a_port_and_local_rank(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        taken.listen()
        with pytest.raises(Refusal, match=f"--master_port {port}: expected a free port of this machine"):
            launch_script.main(["--device", "cpu", "--master_port", str(port), "train.py"])
    here = f"--device cpu --master_addr 127.0.0.1 --master_port {port}"
    assert (
        launch_script.main([*here.split(), "--num-gpus", "2", "--module", "--local_rank", "train", "--epochs", "3"])
        == 0
    )
    lines = [f"127.0.0.1 {port} --local_rank=0 --epochs 3", f"rank 1: 127.0.0.1 {port} --local_rank=1 --epochs 3"]
    assert sorted(capfd.readouterr().out.splitlines()) == lines
    assert launch_script.main(["--device", "cpu", "--no_python", "--no_local_rank", "echo", "a", "--module"]) == 0
    assert capfd.readouterr().out == "a --module\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--module train.py", "--module train.py: expected a module's name, found a file; leave --module out, or"),
        ("--no_python nosuchprogram", "--no_python nosuchprogram: expected a program"),
        ("--master_addr 192.0.2.1 train.py", "--master_addr 192.0.2.1 --master_port 0: expected a free port of this"),
        ("--node_rank 1 train.py", "--node_rank 1: expected 0; type torchrun on each machine, or name them"),
        ("--num_nodes 2 train.py", "--num_nodes 2: expected 1; type torchrun on each machine, or name them"),
        ("--hostfile none train.py", "--hostfile none: expected a file, found none"),
        ("--hostfile train.py train.py", "--hostfile train.py: expected lines `NAME slots=N`, one for a name, found"),
        ("--hostfile two --num_nodes 3 train.py", "--num_nodes 3: expected 1 to 2, as --hostfile has, found 3"),
        ("-H two -i worker-1:2 train.py", "--include worker-1:2: expected slots of worker-0:0,1,2,3 worker-1:0,1"),
        ("-H one -e this train.py", "--exclude this: expected slots that are left, found none"),
        ("-H one -e this -i this train.py", "argument -i/--include: not allowed with argument -e/--exclude"),
        ("-i localhost --num_gpus 1 train.py", "--include, --exclude: expected no --num_gpus and --num_nodes"),
        ("--no_ssh train.py", "--no_ssh: it is not here: type torchrun on each machine"),
        ("-H two none.py", "none.py: expected a Python script, found no file"),
        ("-H two train.py", ".deepspeed_env: expected lines `NAME=VALUE`, found 'wrong'"),
        ("--save_pid train.py", "--save_pid: it is not here: the shell has"),
        ("-q train.py", "-q: it is not here: the launcher prints one line"),
        ("--autotuning tune train.py", "--autotuning: it is not here: `zlab choose` finds"),
    ],
)  # fmt: skip
def test_words_that_cannot_work_are_refused_by_name(words: str, told: str) -> None:
    if "wrong" in told:
        Path(".deepspeed_env").write_text("NAME=value\nwrong\n", encoding="utf-8")
    with pytest.raises(Refusal) as caught:
        launch_script.main(["--device", "cpu", *words.split()])
    assert caught.value.problems[0].startswith(told)


@pytest.mark.parametrize(
    ("words", "hosts"),
    [
        ("-H two", {"worker-0": [0, 1, 2, 3], "worker-1": [0, 1]}),
        ("-H two --num_gpus 1", {"worker-0": [0], "worker-1": [0]}),
        ("-H two -i worker-1@worker-0:1,3", {"worker-0": [1, 3], "worker-1": [0, 1]}),
        ("-H two -e worker-0:0@worker-1:1", {"worker-0": [1, 2, 3], "worker-1": [0]}),
        ("-H one --force_multi", {"this": [0, 1]}),
    ],
)
def test_slots_of_several_machines_start_over_ssh(
    words: str, hosts: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[object] = []
    monkeypatch.setattr(launch_script, "run_on_hosts", lambda slots, asked: taken.append(slots) or ScriptEnd())
    assert launch_script.main([*words.split(), "train.py"]) == 0
    assert taken == [hosts]


def test_ranks_of_several_machines_are_numbered_through() -> None:
    told = {"address": "a", "port": 5, "world": 6, "first": 4, "host": 1, "peer": "no.such.host.invalid"}
    found = rank_environment(Placement(2, Device.cuda, 1, [1, 3], **told), 1, "a", 5, {})
    place = {"RANK": "5", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}
    place |= {"MASTER_ADDR": "a", "MASTER_PORT": "5", "CUDA_VISIBLE_DEVICES": "1,3"}
    assert {name: found.get(name) for name in place} == place
    assert "GLOO_SOCKET_IFNAME" not in found  # the loopback leads to no other machine
