"""Rules for the output folder: only its user controls its contents, and all programs involved accept its path."""

from __future__ import annotations

import os
from pathlib import Path

from orchestrator.config.cluster import Cluster
from orchestrator.config.strict import Broken
from orchestrator.machine import slots
from orchestrator.machine.interfaces import check_meeting_place
from orchestrator.planning.rules import cluster as cluster_rules
from orchestrator.planning.rules.scene import Scene
from orchestrator.records.ownership import trouble_of_own, trouble_of_parents
from orchestrator.records.run_record import make_output
from orchestrator.text.paths import expanded

INSIDE = ("points", "sweeps", "joins", "scratch", "artifacts")


def output_is_the_user_s(scene: Scene, output: str) -> Broken | None:
    """Records control what a run does and where it writes, so no other user may be able to write them."""
    try:
        typed = Path(output).expanduser().absolute()
        places = dict.fromkeys((typed, typed.resolve()))
        above = [trouble_of_parents(place) for place in places]
        troubles = [*above, *(trouble_of_own(one) for one in (typed, *(typed / name for name in INSIDE)))]
    except (OSError, RuntimeError, ValueError):  # reported where the folder is made, in `place_problems`
        return None
    trouble = next(filter(None, troubles), None)
    if trouble is None:
        return None
    rule = "output must be yours, and neither it nor what holds it everybody's to write to (chmod o-w)"
    return Broken(rule, f"{output}, and {trouble}", ("output=outputs",))


def output_can_be_written_down(scene: Scene, output: str) -> Broken | None:
    """Records and MLflow store the path as text."""
    try:
        output.encode()
    except UnicodeEncodeError:
        found = output.encode("utf-8", errors="backslashreplace").decode()
        return Broken("output must be a path in UTF-8", found, ("output=outputs",))
    return None


def slurm_takes_the_output(scene: Scene, output: str, cluster: Cluster) -> Broken | None:
    """sbatch replaces patterns such as %j anywhere in the path of a log, and a line break would split its script."""
    if not cluster_rules.is_slurm(cluster):
        return None
    odd = sorted({char for char in str(expanded(output).absolute()) if char == "%" or not char.isprintable()})
    if not odd:
        return None
    rule = "cluster=slurm needs an output without % and control characters in its path"
    return Broken(rule, f"{output!r}", ("output=outputs",))


def place_problems(output: str, *, starts_ranks: bool = True) -> list[str]:
    """The problems of what a run on this machine needs of it: the output folder, the locks of slots and, if it starts
    ranks here, the loopback over which they meet."""
    problems = []
    try:
        make_output(output)
    except (OSError, ValueError) as error:  # ValueError: a zero byte
        found = getattr(error, "strerror", None) or error
        problems.append(
            f"output={output}: expected a folder that can be written to, found: {found}      fix: output=FOLDER"
        )
    try:
        slots.locks_folder()
    except slots.LocksError as error:
        problems.append(str(error))
    if starts_ranks:
        try:
            check_meeting_place(os.environ)
        except OSError as error:
            problems.append(str(error))
    return problems
