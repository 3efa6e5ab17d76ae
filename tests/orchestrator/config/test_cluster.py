"""Cluster settings are checked, so that no text of the configuration can become a line of the batch script."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.config.cluster import Cluster, ClusterKind
from orchestrator.config.strict import ConfigError


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("partition", "main\n#SBATCH --output=/etc/passwd"),
        ("account", ""),
        ("constraint", "a\x00b"),
        ("setup", ["module load cuda\nrm -rf somewhere"]),
        ("additional", {"comment": "a\nb"}),
        ("additional", {"output": "elsewhere"}),
        ("additional", {"signal": "KILL@1"}),
        ("additional", {"--comment": "a"}),
        ("additional", {"comment": False}),
        ("additional", {"comment": ["a"]}),
        ("throttle", 0),
        ("memory_gib", 0.0),
        ("signal_delay_s", 5),
        ("usd_per_gpu_hour", -1.0),
    ],
)
def test_invalid_values_and_text_that_could_change_the_script_are_refused_by_key(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"cluster.{key} must be"):
        Cluster(ClusterKind.slurm, **{key: value})


def test_settings_that_sites_require_are_accepted() -> None:
    Cluster(
        ClusterKind.slurm,
        partition="gpu,gpu-long",
        constraint="[a100*2&h100*1]",
        setup=["source /etc/profile.d/modules.sh", "module load cuda/12"],
        additional={"reservation": "friday", "nice": 100, "contiguous": True},
    )
