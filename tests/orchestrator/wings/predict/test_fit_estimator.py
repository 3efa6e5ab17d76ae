"""`zlab fit --estimator` prints the tables of DeepSpeed's documentation, line by line."""

from __future__ import annotations

import json

import pytest

from orchestrator import cli

# The guide of Hugging Face Transformers 4.47 on DeepSpeed: "bigscience/T0_3B", one GPU.
T0_3B = """\
Estimated memory needed for params, optim states and gradients for a:
HW: Setup with 1 node, 1 GPU per node.
SW: Model with 2783M total params, 65M largest layer params.
  per CPU  |  per GPU |   Options
   70.00GB |   0.25GB | offload_param=cpu , offload_optimizer=cpu , zero_init=1
   70.00GB |   0.25GB | offload_param=cpu , offload_optimizer=cpu , zero_init=0
   62.23GB |   5.43GB | offload_param=none, offload_optimizer=cpu , zero_init=1
   62.23GB |   5.43GB | offload_param=none, offload_optimizer=cpu , zero_init=0
    0.37GB |  46.91GB | offload_param=none, offload_optimizer=none, zero_init=1
   15.56GB |  46.91GB | offload_param=none, offload_optimizer=none, zero_init=0
"""
# DeepSpeed's page "Memory Requirements": t5-3b, eight GPUs, called with 2851e6 and 32e6. Its table of ZeRO-2 without
# offload has 15.93, by the formula before pull request 5099; the code of 0.19.6 gives 11.28.
T5_ZERO2 = """\
HW: Setup with 1 node, 8 GPUs per node.
SW: Model with 2851M total params.
  per CPU  |  per GPU |   Options
  127.45GB |   5.31GB | offload_optimizer=cpu
  127.45GB |  11.28GB | offload_optimizer=none
"""
T5_ZERO3 = """\
HW: Setup with 1 node, 8 GPUs per node.
SW: Model with 2851M total params, 32M largest layer params.
  per CPU  |  per GPU |   Options
   71.69GB |   0.12GB | offload_param=cpu , offload_optimizer=cpu , zero_init=1
  127.45GB |   0.12GB | offload_param=cpu , offload_optimizer=cpu , zero_init=0
   63.72GB |   0.78GB | offload_param=none, offload_optimizer=cpu , zero_init=1
  127.45GB |   0.78GB | offload_param=none, offload_optimizer=cpu , zero_init=0
    1.43GB |   6.09GB | offload_param=none, offload_optimizer=none, zero_init=1
  127.45GB |   6.09GB | offload_param=none, offload_optimizer=none, zero_init=0
"""


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["fit", "--estimator", *words]) == 0
    return capsys.readouterr().out


def test_the_table_of_t0_3b_is_printed_to_the_digit(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "2783959040,65798144")
    assert T0_3B in out
    assert "GiB, 2^30 bytes" in out
    assert "left out  of each GPU: activations" in out
    assert "up to 1.96 GiB of gathered parameters" in out


def test_rounded_numbers_change_the_last_digits_as_in_deepspeed(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "2783M,65M")
    assert "   69.98GB |   0.24GB | offload_param=cpu" in out
    assert "   15.55GB |  46.90GB | offload_param=none, offload_optimizer=none, zero_init=0" in out


def test_the_tables_of_t5_3b_on_eight_gpus_are_printed_to_the_digit(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "2.851B,32M", "resources.ranks=8")
    assert T5_ZERO2 in out
    assert T5_ZERO3 in out


def test_gpus_are_spread_over_the_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, "2851M,32M", "resources.ranks=16", "resources.nodes=2")
    assert "HW: Setup with 2 nodes, 8 GPUs per node." in out


def test_programs_get_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    tables = json.loads(printed(capsys, "1000,10", "resources.ranks=2", "--json"))
    assert tables["ZeRO-2"][1] == {
        "params_on_host": False,
        "optimizer_on_host": False,
        "zero_init": None,
        "host_bytes": 12000,
        "gpu_bytes": 11000,
    }
    assert [line["gpu_bytes"] for line in tables["ZeRO-3"]] == [40, 40, 1040, 1040, 9040, 9040]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("2783M",), "--estimator: expected the numbers of parameters of the model and of its largest layer, found"),
        (("65M,2783M",), "--estimator: expected the numbers of parameters"),
        (("1M,1M,1M",), "--estimator: expected the numbers of parameters"),
        (("1M,0",), "--estimator: expected the numbers of parameters"),
        (("1M,1K",), "--estimator: expected the numbers of parameters"),
        (("2M,1M", "zero=stage3"), "--estimator knows resources.ranks=N and resources.nodes=N, found 'zero=stage3'"),
        (("2M,1M", "resources.ranks=3", "resources.nodes=2"), "resources.ranks must be a multiple of resources.nodes"),
        (("2M,1M", "--all"), "--estimator prints its own tables: leave out --table, --as, --explain and --all"),
    ],
)
def test_what_the_estimators_do_not_know_is_refused(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], problem: str
) -> None:
    assert cli.main(["fit", "--estimator", *words]) == 2
    assert f"error: {problem}" in capsys.readouterr().err
