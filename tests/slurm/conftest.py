"""Fixtures: a SLURM cluster of two nodes that runs on this machine during the tests, and jobs submitted to it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from sending import LONG, Sent, send, stub_config, train, trained, variables

from orchestrator.config.schema import Checkpoint, RunConfig

SCRIPTS = Path(__file__).parent / "cluster"


@contextmanager
def running_cluster(**environment: str) -> Iterator[Path]:
    """Starts a cluster that SLURM's command-line tools find, and stops its daemons on exit."""
    missing = [tool for tool in ("slurmctld", "slurmd", "munged", "sbatch", "srun") if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        pytest.fail(
            f"expected SLURM on this machine and to be root, found no {', '.join(missing) or 'root'}: "
            "apt-get install --no-install-recommends slurm-wlm slurmctld slurmd slurm-client munge"
        )
    folder = Path(tempfile.mkdtemp(prefix="zlab-slurm-"))
    try:
        subprocess.run([SCRIPTS / "up.sh", folder], env={**os.environ, **environment}, check=True, timeout=120)
        with variables(SLURM_CONF=str(folder / "slurm.conf")):
            yield folder
    finally:
        subprocess.run([SCRIPTS / "down.sh", folder], check=True, timeout=60)
        crashes = folder / "crashes"
        if crashes.exists():
            print(f"SLURM itself crashed; jobs that it was starting then have failed with it: {crashes.read_text()}")
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Path]:
    """A cluster without accounting, on which sacct cannot answer."""
    with running_cluster() as folder:
        yield folder


def _two_shapes(root: Path) -> list[RunConfig]:
    """Points that need two job arrays: SLURM's own throttle, which is per array, would let twice as many run."""
    return [stub_config(root, throttle=1, limit_min=limit) for limit in (5.0, 6.0) for _ in range(2)]


@pytest.fixture(scope="session")
def sent(cluster: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Sent]:
    """Jobs that are submitted together, since they mostly wait; each test then follows its own job to the end.

    A test that must catch a job in the middle of its run submits that job itself: how long the tests before it take is
    unknown.
    """
    root = tmp_path_factory.mktemp("sent")
    hang = {"ZLAB_FAULT": "hang@step2:rank0"}
    unsaved = replace(trained(), checkpoint=Checkpoint())
    return {
        # Here SLURM sends the signal between 40 and 70 s after the start; a step takes a second.
        "long": train(root / "long", trained(LONG, limit_min=2.0), ZLAB_FAULT="slow@step1:rank0"),
        "timeout": send(root / "timeout", [stub_config(root, limit_min=1.0)], **hang),
        "unbroken": train(root / "unbroken", trained()),
        "killed": train(root / "killed", unsaved, ZLAB_FAULT="sigkill@step3:rank1"),
        "array": send(root / "array", [stub_config(root, throttle=2)] * 6, STUB_STEP_S="0.3"),
        "shapes": send(root / "shapes", _two_shapes(root), STUB_STEP_S="0.3"),
        "raised": send(root / "raised", [stub_config(root, ranks=2, nodes=2)], ZLAB_FAULT="raise@step2:rank1"),
        "cancelled": send(root / "cancelled", [stub_config(root, ranks=2, nodes=2)], **hang),
        "memory": train(root / "memory", trained(memory_gib=0.1)),
    }
