"""What must hold of the output folder: nobody else decides what lies in it, and its path is one that all can take."""

from __future__ import annotations

from pathlib import Path

from orchestrator.config.cluster import Cluster
from orchestrator.config.strict import Broken
from orchestrator.machine import slots
from orchestrator.plan.rules import cluster as cluster_rules
from orchestrator.plan.rules.scene import Scene
from orchestrator.records.run_record import make_output
from orchestrator.text.paths import expanded
from zero_runtime.kernels.ownership import trouble_of_own, trouble_of_parents

INSIDE = ("points", "sweeps", "joins", "scratch", "artifacts")


def output_is_the_user_s(scene: Scene, output: str) -> Broken | None:
    """Records steer what a run does and where it writes; in a folder of somebody else's they would be his."""
    try:
        typed = Path(output).expanduser().absolute()
        places = dict.fromkeys((typed, typed.resolve()))
        above = [trouble_of_parents(place) for place in places]
        troubles = [*above, *(trouble_of_own(one) for one in (typed, *(typed / name for name in INSIDE)))]
    except (OSError, RuntimeError, ValueError):  # told by the rule that it can be written to
        return None
    trouble = next(filter(None, troubles), None)
    if trouble is None:
        return None
    rule = "output must be yours, and neither it nor what holds it everybody's to write to (chmod o-w)"
    return Broken(rule, f"{output}, and {trouble}", ("output=outputs",))


def output_can_be_written_down(scene: Scene, output: str) -> Broken | None:
    """Records and MLflow hold it as text."""
    try:
        output.encode()
    except UnicodeEncodeError:
        found = output.encode("utf-8", errors="backslashreplace").decode()
        return Broken("output must be a path in UTF-8", found, ("output=outputs",))
    if "\0" in output:
        return Broken("output must be a path, which has no zero byte", f"{output!r}", ("output=outputs",))
    return None


def slurm_takes_the_output(scene: Scene, output: str, cluster: Cluster) -> Broken | None:
    """sbatch replaces %j and the like in the names of logs, wherever they stand, and its script has lines."""
    if not cluster_rules.is_slurm(cluster):
        return None
    odd = sorted({char for char in str(expanded(output).absolute()) if char == "%" or not char.isprintable()})
    if not odd:
        return None
    rule = "cluster=slurm needs an output without % and control characters in its path"
    return Broken(rule, f"{output!r}", ("output=outputs",))


def place_problems(output: str) -> list[str]:
    """What is wrong with the places that a run on this machine writes to: its outputs and the locks of slots."""
    problems = []
    try:
        make_output(output)
    except OSError as error:
        expected = "expected a folder that can be made and written to"
        problems.append(f"output={output}: {expected}, found: {error.strerror}      fix: output=FOLDER")
    try:
        slots.locks_folder()
    except slots.LocksError as error:
        problems.append(str(error))
    return problems
