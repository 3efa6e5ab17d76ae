"""An MLflow store: a database or a server, and the experiments and runs in it. The only module that imports mlflow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.machine.locks import locked
from orchestrator.records.run_record import artifacts_path
from orchestrator.tracking import chart_page, schema_version

BATCH = 500  # values in one request
TAG_LIMIT, EXPERIMENT_TAG_LIMIT = 8000, 20_000  # characters of a tag's value


class StoreError(ValueError):
    """The store must not be opened."""


class MlflowStore:
    """An MLflow client for our experiments. Creates each one once, with its chart page.

    StoreError if the store is a database of another version, which opening it could migrate under running jobs.
    OSError if a database does not answer.
    """

    def __init__(self, uri: str, output: Path) -> None:
        if problem := schema_version.checked(uri):
            raise StoreError(problem)
        import mlflow  # imported here: it takes seconds, and `ui` does not need it
        from mlflow.entities import Metric, Param, RunTag

        self._metric, self._param, self._tag = Metric, Param, RunTag
        path = schema_version.sqlite_file(uri)
        # One process at a time creates the store: two would break each other's migration of a new SQLite file.
        with locked(output / ".mlflow.lock"):
            if path is not None and not (path.exists() and path.stat().st_size):
                _create(uri, path)
            self.client = mlflow.MlflowClient(tracking_uri=uri)
        self.uri, self.output = uri, output
        self._experiments: dict[str, str] = {}

    def experiment(self, name: str) -> str:
        """The id of the experiment, which is created if it does not exist."""
        if name not in self._experiments:
            with locked(self.output / ".mlflow.lock"):
                self._experiments[name] = self._open(name)
        return self._experiments[name]

    def _open(self, name: str) -> str:
        known = self.client.get_experiment_by_name(name)
        if known is None:
            # A server has a place for artifacts of its own; a database is next to nothing but our records.
            where = artifacts_path(self.output).as_uri() if schema_version.is_database(self.uri) else None
            experiment = str(self.client.create_experiment(name, artifact_location=where))
        else:
            experiment = str(known.experiment_id)
        self._describe(experiment, {chart_page.tag_of(""): chart_page.view()}, {} if known is None else known.tags)
        return experiment

    def describe(self, name: str, tags: Mapping[str, str]) -> None:
        """Sets the tags of the experiment that have another value; of a long one, its beginning."""
        experiment = self.experiment(name)
        self._describe(experiment, tags, self.client.get_experiment(experiment).tags)

    def _describe(self, experiment: str, tags: Mapping[str, str], there: Mapping[str, str]) -> None:
        for key, value in tags.items():
            if there.get(key) != value[:EXPERIMENT_TAG_LIMIT]:
                self.client.set_experiment_tag(experiment, key, value[:EXPERIMENT_TAG_LIMIT])

    def runs(self, experiment: str, tags: Mapping[str, str] | None = None, *, searched_by: str = "") -> Iterator[Any]:
        """The runs of the experiment with these tags, newest first. The query uses one of the tags, whose value needs
        no quoting."""
        tags = tags or {}
        query = f"tags.`{searched_by}` = '{tags[searched_by]}'" if searched_by else ""
        token: str | None = None
        while True:
            page = self.client.search_runs([self.experiment(experiment)], query, page_token=token)
            yield from (run for run in page if tags.items() <= run.data.tags.items())
            token = page.token
            if not token:
                return

    def run_of(self, experiment: str, tags: Mapping[str, str], *, searched_by: str) -> str | None:
        """The id of the newest run with these tags."""
        return next((str(run.info.run_id) for run in self.runs(experiment, tags, searched_by=searched_by)), None)

    def create_run(self, experiment: str, name: str, tags: Mapping[str, str]) -> str:
        run = self.client.create_run(self.experiment(experiment), run_name=name, tags=dict(tags))
        return str(run.info.run_id)

    def log_metrics(self, run: str, points: Sequence[tuple[str, float, int, int]]) -> None:
        """Writes points of (name, value, step, time in ms). Those that are there already change nothing."""
        for begin in range(0, len(points), BATCH):
            batch = [self._metric(key, value, when, step) for key, value, step, when in points[begin : begin + BATCH]]
            self.client.log_batch(run, metrics=batch)

    def log_params(self, run: str, values: Mapping[str, str]) -> None:
        every = [self._param(key, value) for key, value in values.items()]
        for begin in range(0, len(every), 100):
            self.client.log_batch(run, params=every[begin : begin + 100])

    def set_tags(self, run: str, values: Mapping[str, str]) -> None:
        self.client.log_batch(run, tags=[self._tag(key, value[:TAG_LIMIT]) for key, value in values.items()])


def _create(uri: str, path: Path) -> None:
    """Creates the SQLite file of a store, whole or not at all. MLflow commits each of its migrations, so a process that
    ends between two of them would leave a database of an earlier version."""
    from mlflow.store.db import utils

    databases: Any = utils  # its functions have no types
    partial = path.with_name(f"{path.name}.partial")
    for left in (partial, partial.with_name(f"{partial.name}-journal")):
        left.unlink(missing_ok=True)
    address, mark, options = uri.partition("?")
    path.parent.mkdir(parents=True, exist_ok=True)
    engine = databases.create_sqlalchemy_engine(f"{address}.partial{mark}{options}")
    try:
        databases._initialize_tables(engine)
    finally:
        engine.dispose()
    partial.rename(path)
