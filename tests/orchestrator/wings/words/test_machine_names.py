"""`hardware=` takes machines by short names and numbers of GPUs, on every line that is composed."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.compose import arguments
from orchestrator.compose.line import composed
from orchestrator.config.strict import Refusal
from orchestrator.wings.words.machine_names import machines, spelled

RANKS_4 = "resources.ranks=4"


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("hardware=8xh100", ["hardware=h100_80gb"]),
        ("hardware=4xh200", ["hardware=h200 hardware.gpus=4"]),
        ("hardware=16xh100", ["hardware=h100_80gb resources.nodes=2"]),
        ("hardware=2xrtx_4090", ["hardware=rtx_4090 hardware.gpus=2"]),
        ("hardware=rtx_4090 resources.ranks=2", ["hardware=rtx_4090 hardware.gpus=2 resources.ranks=2"]),
        ("hardware=a100_80gb resources.ranks=16", ["hardware=a100_80gb resources.nodes=2 resources.ranks=16"]),
        ("hardware=a100_80gb resources.ranks=2", ["hardware=a100_80gb resources.ranks=2"]),  # of the node's 8
        (
            "hardware=t4 resources.ranks=4 resources.nodes=2",
            [f"hardware=t4 hardware.gpus=2 {RANKS_4} resources.nodes=2"],
        ),
        (
            "hardware=rtx_4090 hardware.gpus=3 resources.ranks=2",
            ["hardware=rtx_4090 hardware.gpus=3 resources.ranks=2"],
        ),
        ("hardware=8xh100 resources.nodes=2", ["hardware=h100_80gb hardware.gpus=4 resources.nodes=2"]),
        ("hardware=t4,2xa10 zero=stage3", ["hardware=t4 zero=stage3", "hardware=a10 hardware.gpus=2 zero=stage3"]),
        ("zero=stage3", ["zero=stage3"]),
    ],
)
def test_ranks_and_nodes_follow_from_the_machine(line: str, found: list[str]) -> None:
    assert [" ".join(words) for _, words in machines(line.split(), None)] == found


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("hardware=8xh100", ("h100_80gb", 8, 1)),
        ("hardware=2xrtx_4090", ("rtx_4090", 2, 1)),
        ("hardware=rtx_4090 resources.ranks=2", ("rtx_4090", 2, 1)),
        ("hardware=16xh100", ("h100_80gb", 8, 2)),
    ],
)
def test_a_run_has_the_machine_that_fit_has(line: str, found: tuple[str, int, int]) -> None:
    (point,) = composed(arguments.split(["--plan", *line.split()])).points
    values = point.values
    assert (values["hardware"]["name"], values["hardware"]["gpus"], values["resources"]["nodes"] or 1) == found


def test_a_list_of_machines_is_one_axis() -> None:
    for line, found in (
        ("hardware=8xh100,rtx_4090 zero=stage1", ["hardware=h100_80gb,rtx_4090", "zero=stage1"]),
        ("hardware=rtx_4090,t4 resources.ranks=2", ["hardware=rtx_4090,t4", "resources.ranks=2"]),
        ("hardware=choice(t4,a10)", ["hardware=choice(t4,a10)"]),
    ):
        assert spelled(line.split(), None) == found
        assert spelled(found, None) == found


@pytest.mark.parametrize("text", [b"\xff", b"gpus", b"[" * 2000, b"{", b"gpus: many"])
def test_a_broken_option_is_left_to_what_composes_it(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "hardware").mkdir()
    (tmp_path / "hardware" / "mine.yaml").write_bytes(text)
    assert spelled(["hardware=mine"], str(tmp_path)) == ["hardware=mine"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("hardware=8xa100", "fix: hardware=8xa100_40gb   or   hardware=8xa100_80gb"),
        ("hardware=12xh100", "found 12 GPUs on nodes of 8 GPUs      fix: hardware=16xh100$"),
        ("hardware=3xh100 resources.nodes=2", "found 3 GPUs on resources.nodes=2      fix: hardware=4xh100$"),
        ("hardware=8xh100 hardware.gpus=4", "found hardware.gpus=4 too"),
        ("hardware=8xh100,2xrtx_4090", "one table: .* fit hardware=8xh100,2xrtx_4090$"),
        ("hardware=8xh1000", "no option '8xh1000'|no option 'h1000'"),
    ],
)
def test_what_names_no_machine_is_refused(line: str, told: str) -> None:
    with pytest.raises(Refusal, match=told):
        composed(arguments.split(["-m", "--plan", *line.split()]))
