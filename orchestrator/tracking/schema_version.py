"""Whether MLflow's version that is installed can use a database. Read without importing mlflow, and changes nothing.

MLflow checks the version of a database only if no table is missing. A database of an earlier version lacks tables, so
that opening it migrates it, also while runs of the earlier version write to it. Hence the version is compared here
before anything of ours opens a database.
"""

from __future__ import annotations

import importlib.util
import re
import sqlite3
from contextlib import closing
from functools import cache
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote

from orchestrator.text.extras import install_line
from orchestrator.tracking import names

SQLITE = "sqlite:///"
QUERY = "SELECT version_num FROM alembic_version"
CONNECT_S = 5
_REVISION = re.compile(r'^(down_)?revision\b.*?= *["\'](\w+)["\']', re.MULTILINE)


def problem(uri: str) -> str | None:
    """Why the store cannot be used, in one line with what to type; None if it can, and for a store that is a server,
    does not exist yet, or gives no answer: those are told when they are used."""
    try:
        return checked(uri)
    except OSError:
        return None


def checked(uri: str) -> str | None:
    """The same; OSError if a database gives no answer, for which MLflow would wait minutes."""
    if not is_database(uri):
        return None
    if uri.startswith(SQLITE) and names.QUOTED in uri and not names.decodes():
        why = f"expected SQLAlchemy 2.1 for a path with '?', found {metadata.version('sqlalchemy')}, which would cut it"
        return f"{uri}: {why}; take another output, tracking.uri=..., tracking=none, or Python 3.11 and SQLAlchemy 2.1"
    try:
        found = _version(uri)
    except ImportError as error:
        return f"{without_password(uri)} needs a driver that is not installed: {error}      fix: {_driver_fix(uri)}"
    known = _known()
    if found is None or found == _newest(known):
        return None
    here = f"the installed MLflow {metadata.version('mlflow')} expects {_newest(known)}"
    where = f"{without_password(uri)}: its tables have version {found}, {here}"
    if found in known:
        how = "end everything that uses it, copy it, and type: python -m mlflow db upgrade"
        return f"{where}; {how} '{without_password(uri)}', or take another: tracking.uri=..., tracking=none"
    return f"{where}; a later MLflow made it: install that, or take another store: tracking.uri=..., tracking=none"


def is_database(uri: str) -> bool:
    """Whether MLflow opens this store itself, not through a server."""
    return uri.split(":")[0].split("+")[0] in ("sqlite", "postgresql", "mysql", "mssql")


def sqlite_file(uri: str) -> Path | None:
    """The file of an SQLite store; None for every other store."""
    if not uri.startswith(SQLITE):
        return None
    written = uri.removeprefix(SQLITE).partition("?")[0]
    return Path(unquote(written) if names.decodes() else written).absolute()


def without_password(uri: str) -> str:
    """The address, fit to be shown."""
    return re.sub(r"(://[^/@:]*):[^/@]*@", r"\1:***@", uri)


def _driver_fix(uri: str) -> str:
    scheme, _, rest = without_password(uri).partition("://")
    if scheme in ("postgresql", "postgresql+psycopg2"):
        return f"tracking.uri=postgresql+psycopg://{rest}"
    return install_line("postgres") if uri.startswith("postgresql") else "install the driver of its address"


def _version(uri: str) -> str | None:
    """The version of the tables; None for a store without them, and for a file that cannot be read."""
    path = sqlite_file(uri)
    if path is not None:
        if not path.is_file():
            return None
        try:
            with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
                row = connection.execute(QUERY).fetchone()
        except sqlite3.Error:
            return None
        return None if row is None else str(row[0])
    return _version_by_driver(uri)


def _version_by_driver(uri: str) -> str | None:
    import sqlalchemy  # imported here: only a database that is no file needs it

    arguments = {"connect_timeout": CONNECT_S} if uri.startswith("postgresql") else {}
    try:
        engine = sqlalchemy.create_engine(uri, connect_args=arguments)
    except sqlalchemy.exc.NoSuchModuleError as error:
        raise ImportError(str(error)) from None
    try:
        with engine.connect() as connection:
            found = connection.execute(sqlalchemy.text(QUERY)).scalar()
    except sqlalchemy.exc.ProgrammingError:  # it has no such table
        return None
    except sqlalchemy.exc.SQLAlchemyError as error:
        first = str(error).splitlines()[0]
        raise OSError(f"{without_password(uri)} does not answer: {first}") from None
    finally:
        engine.dispose()
    return None if found is None else str(found)


@cache
def _known() -> dict[str, str]:
    """The versions that the installed MLflow can migrate from, each with the one before it; "" for the first."""
    spec = importlib.util.find_spec("mlflow")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    known: dict[str, str] = {}
    for file in (Path(folders[0]) / "store" / "db_migrations" / "versions").glob("*.py") if folders else ():
        here = {bool(down): name for down, name in _REVISION.findall(file.read_text(encoding="utf-8"))}
        if False in here:
            known[here[False]] = here.get(True, "")
    return known


def _newest(known: dict[str, str]) -> str:
    (newest,) = known.keys() - set(known.values())
    return newest
