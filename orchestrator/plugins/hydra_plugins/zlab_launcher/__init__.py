"""The Hydra launcher `zlab`: measures the points that a sweeper proposes, and returns their metrics to the sweeper.

Hydra 1.3 takes plugins only from the namespace package hydra_plugins, and imports all of it at every start, as 1.4
does: so this module imports our packages only when they are needed. Hydra 1.3 executes the file before the module is in
sys.modules, where a dataclass with annotations as text fails: hence no `from __future__ import annotations`.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus, filter_overrides
from hydra.errors import CompactHydraException
from hydra.plugins.launcher import Launcher

if TYPE_CHECKING:
    from orchestrator.wings.optuna.trials import Asked, Trial

log = logging.getLogger(__name__)


@dataclass
class ZlabLauncherConf:
    """rank_by: the metric that is returned, named as in declared sweeps, or a list: one for each objective of a study.

    retry: states to run again, as for `--retry`. unfit: the value, or list of values, returned for a point that does
    not fit (out of memory, left out) or breaks a rule; null makes it a failed job, which samplers forget. It has no
    default: only the user knows a bad value in the unit of the metric.
    """

    _target_: str = "hydra_plugins.zlab_launcher.ZlabLauncher"
    rank_by: Any = "tokens_per_second"
    unfit: Any = None
    retry: str = ""


ConfigStore.instance().store(group="hydra/launcher", name="zlab", node=ZlabLauncherConf, provider="zero-lab")


class NotMeasured(CompactHydraException):
    """The point has no value of a metric; the message says why. Hydra prints it without a traceback."""


class ZlabLauncher(Launcher):
    """Runs each batch that a sweeper proposes as one sweep. The application's task function is not called."""

    def __init__(self, rank_by: Any, unfit: Any, retry: str) -> None:
        self._rank_by = tuple(map(str, _listed(rank_by)))
        self._unfit = None if unfit is None else tuple(_listed(unfit))
        self._retry = retry
        self._config: Any = None

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        from orchestrator.wings.optuna import trials

        self._config = config
        problems = trials.problems(self._asked())
        if not problems:
            problems = trials.unfit_problems(self._rank_by, self._unfit)
            problems += trials.wrong_way(self._rank_by, config.hydra.sweeper.get("direction"))
        if problems:
            raise CompactHydraException("\n".join(f"error: {problem}" for problem in problems))

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from orchestrator.config.strict import Refusal
        from orchestrator.wings.optuna import trials

        Path(self._config.hydra.sweep.dir).mkdir(parents=True, exist_ok=True)  # sweepers write their results there
        lines = [list(filter_overrides(line)) for line in job_overrides]
        try:
            outcomes = trials.measure(lines, self._asked())
        except Refusal as refusal:
            raise CompactHydraException("\n".join(f"error: {problem}" for problem in refusal.problems)) from None
        numbers = range(initial_job_idx, initial_job_idx + len(lines))
        return [self._job_return(*each) for each in zip(numbers, lines, outcomes, strict=True)]

    def _job_return(self, number: int, line: list[str], trial: "Trial") -> JobReturn:
        """The result that the sweeper gets; reading the value of a failed job raises its exception."""
        job = JobReturn(overrides=line, task_name=trial.label)
        job.working_dir = str(trial.folder) if trial.folder else None
        values = self._unfit if trial.values is None and trial.fits_not else trial.values
        job.status = JobStatus.FAILED if values is None else JobStatus.COMPLETED
        if values is None:
            job.return_value = NotMeasured(f"{trial.label}: {trial.state.value}: {trial.message}")
        else:
            job.return_value = values[0] if len(values) == 1 else list(values)
        told = [f"{name} {value:,.6g}" for name, value in zip(self._rank_by, values or (), strict=False)]
        number_text = ", ".join(told) or "no value"
        reason = f": {trial.message}" if trial.message and trial.values is None else ""
        log.info(f"#{number} {trial.label}: {number_text} ({trial.state.value}{reason})")
        return job

    def _asked(self) -> "Asked":
        from orchestrator.wings.optuna import trials

        hydra = self._config.hydra
        added = [source.path for source in hydra.runtime.config_sources if source.provider == "command-line"]
        flags = ("--config-dir", added[-1]) if added else ()
        return trials.Asked(self._rank_by, self._retry, flags, tuple(hydra.overrides.task))


def _listed(value: Any) -> list[Any]:
    """The values of a list of a configuration, or the one value that stands in its place."""
    return [value] if isinstance(value, (str, int, float)) else list(value)
