"""Predictions follow what the ranks of a configuration will communicate over."""

from __future__ import annotations

from dataclasses import replace

import pytest
from points import config_of_line

from orchestrator.config.schema import Device, RunConfig
from orchestrator.wings.predict import memory_cache, speed, transport
from orchestrator.wings.predict.step import rules_of

SHAPES = {"state_bytes": 8.0, "units": []}


def of_line(line: str, *, nodes: int = 1, cuda: bool = False) -> RunConfig:
    config = config_of_line(line)
    resources = replace(config.resources, nodes=nodes, device=Device.cuda if cuda else Device.cpu)
    return replace(config, resources=resources)


@pytest.mark.parametrize(
    ("config", "forbidden", "expected"),
    [
        (of_line(""), "", "shm"),
        (of_line(""), "a reason", "gloo"),
        (of_line("comm=shm"), "", "shm"),
        (of_line("comm=gloo"), "", "gloo"),
        (of_line("resources.ranks=1"), "", "gloo"),
        (of_line("", nodes=2), "", "gloo"),
        (of_line("", cuda=True), "", "nccl"),
    ],
)
def test_the_transport_decides_what_a_sum_receives_and_which_measurements_serve(
    config: RunConfig, forbidden: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "load", lambda _: lambda: forbidden)
    assert transport.transport(config) == expected
    rules = rules_of(config, SHAPES)
    assert rules.reads_peers == (expected == "shm")
    assert rules.by_messages == (expected != "nccl" and config.ranks > 1)
    assert speed.place_of(config)["comm"] == expected


def test_measured_links_and_traces_of_divided_layers_are_of_one_transport() -> None:
    shm, gloo = (of_line(f"parallel=tp2 comm={kind}") for kind in ("shm", "gloo"))
    assert memory_cache.activations_key(shm) != memory_cache.activations_key(gloo)
    whole = [of_line(f"comm={kind}") for kind in ("shm", "gloo")]
    assert len({memory_cache.activations_key(one) for one in whole}) == 1
    kinds = sorted(job.split("-")[0] for job in {job.key for one in whole for job in speed.jobs(one)})
    assert kinds == ["copies", "links", "links", "segments", "segments", "update"]
