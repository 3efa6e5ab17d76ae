"""The loopback address is one that this machine can bind, in IPv4 or IPv6."""

from __future__ import annotations

import socket

import pytest

from orchestrator.commands import doctor
from orchestrator.machine import loopback as module
from orchestrator.machine.loopback import in_url, loopback
from orchestrator.slurm import rank as slurm_rank

NOT_HERE_4, NOT_HERE_6 = "192.0.2.1", "2001:db8::1"  # reserved for documentation: no machine has them


def test_the_first_address_that_can_be_bound_is_taken() -> None:
    here = loopback()
    assert loopback((NOT_HERE_4, here)) == here
    with socket.socket(module.family(here)) as one:
        one.bind((here, 0))


def test_a_machine_with_only_ipv6_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_binds", lambda address: address == "::1")
    assert (loopback(), in_url(loopback())) == ("::1", "[::1]")
    assert doctor._loopback() == ("network", "ranks of this machine meet over loopback, ::1", "")
    environ = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
    slurm_rank.say_place(environ, ["node"])
    assert environ["MASTER_ADDR"] == "::1"


def test_on_a_machine_without_loopback_the_error_names_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="ip link set lo up"):
        loopback((NOT_HERE_4, NOT_HERE_6))
    monkeypatch.setattr(module, "_binds", lambda address: False)
    assert "ranks cannot meet" in doctor._loopback().advice
