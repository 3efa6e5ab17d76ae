"""The degrees of tensor and sequence parallelism in a configuration of DeepSpeed, as `import` reads them."""

from __future__ import annotations

from typing import Any

import pytest

from zero_runtime.deepspeed.config import DropinConfig, examine
from zero_runtime.deepspeed.keys import HOMES
from zero_runtime.deepspeed.schema import Reader


def read(world: int, **given: Any) -> tuple[DropinConfig, list[str]]:
    reader = Reader(HOMES)
    config = examine({"gradient_clipping": 1.0, "train_micro_batch_size_per_gpu": 2, **given}, world, "cpu", reader)
    return config, reader.problems


@pytest.mark.parametrize(
    "section",
    [{"autotp_size": 2}, {"tp_size": 2}, {"tp": {"tp_size": 2}}, {"enabled": True, "autotp_size": 2}],
)
def test_every_name_of_the_degree_of_tensor_parallelism_is_read(section: dict[str, Any]) -> None:
    config, problems = read(4, tensor_parallel=section)
    assert problems == []
    assert config.degrees[:2] == (2, 1)
    assert "a step here has train_batch_size / 2 sequences" in " ".join(config.notes)


@pytest.mark.parametrize("section", [{"autotp_size": 0}, {"autotp_size": 1}, {"enabled": False, "autotp_size": 2}])
def test_tensor_parallelism_that_is_off_divides_nothing(section: dict[str, Any]) -> None:
    config, problems = read(4, tensor_parallel=section)
    assert problems == []
    assert config.degrees[:2] == (1, 1)
    assert config.notes == ()


def test_batch_sizes_count_ranks_as_deepspeed_does() -> None:
    """With sequence parallelism those with other sequences; with tensor parallelism all."""
    config, problems = read(4, sequence_parallel_size=2, data_parallel_size=2, train_batch_size=4)
    assert problems == []
    assert (config.degrees[:2], config.batch.accumulation) == ((1, 2), 1)
    config, problems = read(4, tensor_parallel={"autotp_size": 2}, train_batch_size=8)
    assert problems == []
    assert config.batch.accumulation == 1


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            {"tensor_parallel": {"autotp_size": 3}},
            "tensor_parallel.autotp_size: expected a divisor of the 4 ranks, found 3; the nearest is 2",
        ),
        (
            {"sequence_parallel_size": 8},
            "sequence_parallel_size: expected a divisor of the 4 ranks, found 8; the nearest is 4",
        ),
        ({"sequence_parallel_size": 0}, "sequence_parallel_size: expected at least 1, found 0"),
        (
            {"tensor_parallel": {"autotp_size": 2}, "sequence_parallel_size": 2},
            "sequence_parallel_size: expected 1 beside tensor_parallel.autotp_size=2, found 2: both divide the heads; "
            "keep one",
        ),
        (
            {"sequence_parallel_size": 2, "data_parallel_size": 4},
            "data_parallel_size: expected 4 ranks / 2 (sequence_parallel_size), found 4; leave it out",
        ),
        (
            {"tensor_parallel": {"partition_config": {"layer_specs": [{"patterns": [".*"], "partition_dim": 1}]}}},
            "tensor_parallel.partition_config.layer_specs[0]: expected patterns, partition_dim 0 and shape [N, -1] "
            "of columns, found {'patterns': ['.*'], 'partition_dim': 1}",
        ),
        (
            {"tensor_parallel": {"partition_config": {"layer_specs": [{"patterns": [".*"], "shape": [[4, 2], -1]}]}}},
            "tensor_parallel.partition_config.layer_specs[0]: expected patterns, partition_dim 0 and shape [N, -1] "
            "of columns, found {'patterns': ['.*'], 'shape': [[4, 2], -1]}",
        ),
        (
            {"tensor_parallel": {"partition_config": {"layer_specs": [{"patterns": [".*"]}]}}},
            "tensor_parallel.partition_config: its layers are known with the script's model; name them in "
            "parallel.patterns",
        ),
    ],
)
def test_degrees_that_do_not_fit_are_refused(given: dict[str, Any], told: str) -> None:
    _, problems = read(4, **given)
    assert told in problems
