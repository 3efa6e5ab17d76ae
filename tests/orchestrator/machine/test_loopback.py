"""The loopback address is one that answers, in IPv4 or IPv6; without one nothing starts, and one line says why."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

import pytest

from orchestrator.commands import doctor
from orchestrator.machine import loopback as module
from orchestrator.machine.interfaces import GLOO
from orchestrator.machine.loopback import in_url, loopback
from orchestrator.planning.rules.output import place_problems
from orchestrator.wings.slurm import rank as slurm_rank

NOT_HERE_4, NOT_HERE_6 = "192.0.2.1", "2001:db8::1"  # reserved for documentation: no machine has them


def test_the_first_address_that_answers_is_taken() -> None:
    here = loopback()
    assert loopback((NOT_HERE_4, here)) == here
    with socket.socket(module.family(here)) as one:
        one.bind((here, 0))


def test_a_machine_with_only_ipv6_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_answers", lambda address: address == "::1")
    assert (loopback(), in_url(loopback())) == ("::1", "[::1]")
    assert doctor._loopback() == ("network", "ranks of this machine meet over loopback, ::1", "")
    environ = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
    slurm_rank.say_place(environ, ["node"])
    assert environ["MASTER_ADDR"] == "::1"


def test_on_a_machine_without_loopback_the_error_names_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="ip link set lo up"):
        loopback((NOT_HERE_4, NOT_HERE_6))


def test_a_loopback_that_is_down_can_be_bound_and_is_not_taken_for_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def connect(*_: object) -> None:  # as in a new network namespace, where both addresses can be bound
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.delenv(GLOO, raising=False)
    found = doctor._loopback()
    assert found.advice.endswith("fix: ip link set lo up")
    assert [row.text for row in doctor.what_works([found])] == ["no run, before the warnings are followed: network"]
    assert place_problems(str(tmp_path)) == [found.advice]
    assert place_problems(str(tmp_path), starts_ranks=False) == []
    monkeypatch.setenv(GLOO, "eth0")
    assert place_problems(str(tmp_path)) == []
