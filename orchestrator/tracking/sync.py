"""Writes what a store lacks of an output folder, from its records. A second time it finds nothing to write."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.config.schema import TrackingKind, from_dict
from orchestrator.machine.locks import locked
from orchestrator.records.record_file import read_or_warn, require_json
from orchestrator.records.record_shapes import STATE
from orchestrator.records.run_record import AttemptPaths, settle
from orchestrator.records.run_state import RunState
from orchestrator.records.sweep_record import SweepPaths, all_sweeps, controller_pid, plan_of, standings
from orchestrator.report import comparison
from orchestrator.tracking import left, names
from orchestrator.tracking.feed import store_uri
from orchestrator.tracking.followed_run import command_tags, is_complete, open_single
from orchestrator.tracking.store import MlflowStore, StoreError
from orchestrator.tracking.sweep_names import experiment_of
from orchestrator.tracking.sweep_runs import SweepRuns
from zero_runtime.limits import ConfigError

SINGLE = "single runs"


@dataclass
class Synced:
    """What was done for a sweep, or for the runs in no sweep.

    experiment, summary: the ids of the sweep's experiment and of its summary run. added, completed: numbers of runs,
    the summary counted. left: why nothing was done, or not everything. failed: an error kept it from being done; the
    store may lack up to `missing` runs, and doing it `again` may help.
    """

    what: str
    experiment: str = ""
    summary: str = ""
    added: int = 0
    completed: int = 0
    left: str = ""
    failed: bool = False
    missing: int = 0
    again: bool = False


def sync(output: Path, uri: str = "", sweeps: Sequence[SweepPaths] = ()) -> Iterator[Synced]:
    """Completes these sweeps in their stores; without `sweeps`, all of the output that are tracked, and the runs in no
    sweep. `uri`: the store to write to, instead of that of each run's configuration.

    One line for each sweep, the oldest first. What cannot be done is said in its line.
    """
    stores = _Stores(output, uri)
    tags = command_tags(os.getpid())
    with locked(output / ".tracking.lock"):  # one process at a time completes runs
        for sweep in sweeps or reversed(all_sweeps(output)):
            yield _tried(sweep.name, partial(_sync_sweep, sweep, stores, tags, is_named=bool(sweeps)))
        if not sweeps:
            yield _tried(SINGLE, partial(_sync_single, output, stores, tags))


def _tried(what: str, write: Callable[[Synced], None]) -> Synced:
    """The result of `write`, which fills it in and names a failure in it."""
    done = Synced(what)
    try:
        write(done)
    except Exception as error:
        done.left, done.failed = first_line(error), True
        done.again = not isinstance(error, StoreError)
    return done


class _Stores:
    """The stores of runs, each opened once."""

    def __init__(self, output: Path, uri: str) -> None:
        self._output, self._uri = output, uri
        self.open: dict[str, MlflowStore] = {}

    def of(self, config: Mapping[str, Any]) -> MlflowStore:
        uri = self._uri or store_uri(from_dict(config), self._output, os.environ)
        if uri not in self.open:
            self.open[uri] = MlflowStore(uri, self._output)
        return self.open[uri]

    def takes(self, config: Mapping[str, Any]) -> bool:
        """Whether runs of this configuration are tracked. Those with a setting that is gone are not written."""
        try:
            kind = from_dict(config).tracking.kind
        except ConfigError:
            return False
        return bool(self._uri) or kind is not TrackingKind.none


def _sync_sweep(sweep: SweepPaths, stores: _Stores, tags: Mapping[str, str], done: Synced, *, is_named: bool) -> None:
    configs = [point.config for point in plan_of(sweep) if point.config]
    if not configs or not (is_named or stores.takes(configs[0])):
        done.left = "it was not tracked: name it to write it" if configs else "none of its points can run"
        return
    done.missing = 1 + sum(point.attempt is not None and point.state.final for point in standings(sweep))
    store = stores.of(configs[0])
    runs = SweepRuns(store, sweep, tags)
    done.experiment = store.experiment(runs.experiment)
    runs.prepare()
    if controller_pid(sweep) is not None:
        done.missing = 0
        done.left = f"{sweep.name} runs, and its own tracker writes it"
        return
    _write_missing(runs, done)
    comparison.write(sweep, with_png=True)
    done.summary, is_new = runs.summarize()
    done.added += is_new
    done.missing = 0


def _write_missing(runs: SweepRuns, done: Synced) -> None:
    missing = list(runs.missing())
    done.missing = 1 + len(missing)
    for standing, is_there in missing:
        runs.write(standing)
        done.completed += is_there
        done.added += not is_there
        done.missing -= 1
    runs.end_replaced()


def _sync_single(output: Path, stores: _Stores, tags: Mapping[str, str], done: Synced) -> None:
    """The runs in no sweep: the last measured attempt of each point, and each whose run was cut off."""
    single = list(_single_attempts(output, stores))
    done.missing = sum(is_answer for _, _, is_answer in single)
    there: dict[str, dict[str, Any]] = {}
    for attempt, config, is_answer in single:
        store, experiment = stores.of(config), experiment_of(from_dict(config), None)
        if experiment not in there:
            there[experiment] = {run.data.tags.get(names.ATTEMPT): run for run in store.runs(experiment)}
        run = there[experiment].get(str(attempt.root))
        is_whole = run is not None and is_complete(run, attempt)
        if not is_whole and (is_answer or run is not None) and settle(attempt).final:
            open_single(store, attempt, tags).finish()
            done.completed += run is not None
            done.added += run is None
        done.missing -= is_answer
    done.missing = 0


def _single_attempts(output: Path, stores: _Stores) -> Iterator[tuple[AttemptPaths, dict[str, Any], bool]]:
    """The attempts of tracked points in no sweep that no tracker follows, their configurations, and whether each is the
    last measured one of its point."""
    in_sweeps = {
        point.attempt.root for sweep in all_sweeps(output) for point in standings(sweep) if point.attempt is not None
    }
    others = in_sweeps | left.followed(output)
    for point in sorted((output / "points").glob("*")):
        answer = _last_measured(point)
        for attempt in map(AttemptPaths, sorted((point / "attempts").glob("*"))):
            config = read_or_warn(attempt.config) if attempt.root not in others and attempt.state.exists() else None
            if config is not None and stores.takes(config):
                yield attempt, config, attempt == answer


def complete_left(output: Path) -> None:
    """Completes what the trackers of dead commands left. Failures are printed to stderr, and a later command tries
    again."""
    stores, tags = _Stores(output, ""), command_tags(os.getpid())
    with locked(output / ".tracking.lock", wait=False) as alone:
        # Without the lock, another process completes them.
        for path in left.behind(output) if alone else ():
            root = left.take(path)
            try:
                if root is None or _complete(root, stores, tags):
                    path.unlink(missing_ok=True)
            except Exception as error:
                print(f"{root}: {type(error).__name__}: {error}", file=sys.stderr)


def _complete(root: Path, stores: _Stores, tags: Mapping[str, str]) -> bool:
    """Writes the ended runs of a sweep or an attempt. Whether nothing is left: a scheduler may still have some."""
    sweep, attempt = SweepPaths(root), AttemptPaths(root)
    if attempt.state.exists():
        if settle(attempt).final:
            open_single(stores.of(require_json(attempt.config)), attempt, tags).finish()
        return settle(attempt).final
    if not sweep.plan.exists() or controller_pid(sweep) is not None:
        return True  # it was deleted, or has another tracker
    configs = [point.config for point in plan_of(sweep) if point.config]
    _write_missing(SweepRuns(stores.of(configs[0]), sweep, tags), Synced(sweep.name))
    return True


def _last_measured(point: Path) -> AttemptPaths | None:
    for root in sorted((point / "attempts").glob("*"), reverse=True):
        state = (read_or_warn(AttemptPaths(root).state, STATE) or {}).get("state")
        if state is not None and RunState(state).measured:
            return AttemptPaths(root)
    return None


def first_line(error: Exception) -> str:
    """The beginning of what an error says; its class if it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
