"""The names of a sweep in MLflow: its experiment, and the settings by which its points differ.

A page of MLflow shows one experiment, and the name of a run is its only label in a chart. So a sweep has an experiment
of its own, where each point has one run with its label in this sweep. An answer that was kept from another sweep has a
copy there, marked as kept: the other sweep named it by what varied there.
"""

from __future__ import annotations

from orchestrator.config.schema import RunConfig, from_dict
from orchestrator.records.record_file import read_or_warn
from orchestrator.records.record_shapes import SWEEP
from orchestrator.records.sweep_record import SweepPaths, plan_of
from orchestrator.report.varied import Varied, varied_settings


class SweepNames:
    """Read from the plan of the sweep; BadRecord if it cannot be read.

    experiment: its name. points: the id of each point, by label. levels: the values of
    each setting that varies, by its name as a parameter of runs.
    """

    def __init__(self, sweep: SweepPaths) -> None:
        plan = plan_of(sweep)
        configs = [point.config for point in plan if point.config]
        self.experiment = experiment_of(from_dict(configs[0]), sweep) if configs else f"zlab/{sweep.name}"
        self.points = {point.label: point.point for point in plan}
        varied = varied_settings([point.overrides for point in plan], range(len(plan)))
        self.levels = {_parameter(one): one.levels for one in varied}
        self._values = {
            point.label: {_parameter(one): one.values[number] for one in varied} for number, point in enumerate(plan)
        }

    def values_of(self, label: str) -> dict[str, str]:
        """The values of the settings that vary, in the point with this label."""
        return self._values.get(label, {})


def experiment_of(config: RunConfig, sweep: SweepPaths | None) -> str:
    """The name of the experiment of a run."""
    if config.tracking.experiment:  # all runs are in this one, where the tag of the sweep tells them apart
        return config.tracking.experiment
    # A batch that a program proposes, as Optuna does, is a small sweep of a study and has no command: batches share the
    # experiment of their model.
    is_own = sweep is not None and bool((read_or_warn(sweep.sweep, SWEEP) or {}).get("command"))
    return f"zlab/{sweep.name if is_own and sweep is not None else config.model.name}"


def _parameter(setting: Varied) -> str:
    """The first of the keys that change together, such as `zero` or `batch.micro`."""
    return setting.name.partition(",")[0]
