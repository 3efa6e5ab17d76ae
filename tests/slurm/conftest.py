"""A SLURM cluster of two nodes on this machine, for as long as the tests run."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sending import variables

SCRIPTS = Path(__file__).parent / "cluster"


@contextmanager
def running_cluster(**environment: str) -> Iterator[Path]:
    """A cluster that SLURM's tools find; its daemons end with it."""
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
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Path]:
    """Without accounting: sacct has no answer there."""
    with running_cluster() as folder:
        yield folder
