"""Reads the rows of Parquet and Arrow files through pyarrow, which the extra `data` installs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from orchestrator.text.extras import install_line
from orchestrator.workloads.text_files import TABLES

ROWS = 1024  # of a Parquet file, that are in memory as Python objects at a time


def is_table(path: Path) -> bool:
    """Whether the file's name is that of a table."""
    return path.name.endswith(TABLES)


def rows(path: Path, keys: Sequence[str], at_once: int = ROWS) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each row of a file with its place: its values of `keys`, and None for every other column, which is not read.

    ValueError if pyarrow is missing, or if the file is no such table.
    """
    try:
        import pyarrow
    except ModuleNotFoundError:
        raise ValueError(f"{path}: expected the package pyarrow, found none; {install_line('data')}") from None
    number = 0
    try:
        for names, batch in _batches(path, keys, at_once):
            if twice := [name for name in batch.schema.names if names.count(name) > 1]:
                raise ValueError(f"{path}: expected one column {twice[0]}, found several; remove all but one")
            for row in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", dict.fromkeys(names) | {key: _given(row[key]) for key in row}
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        kind = "Parquet" if path.suffix == ".parquet" else "Arrow"
        why = " ".join(str(error).split())
        raise ValueError(f"{path}: expected a file of {kind}, found another ({why}); write it again") from None


def _given(value: Any) -> Any:
    """A value without the nulls that a column's type adds to objects that lack some of its keys."""
    if isinstance(value, dict):
        return {key: _given(one) for key, one in value.items() if one is not None}
    return [_given(one) for one in value] if isinstance(value, list) else value


def _batches(path: Path, keys: Sequence[str], at_once: int) -> Iterator[tuple[list[str], Any]]:
    """The names of all columns, with the values of some rows in the columns of `keys`."""
    import pyarrow
    from pyarrow import parquet

    if path.suffix == ".parquet":
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            # Without columns a batch has no rows, and then the first row would not be told to be wrong.
            own = [name for name in names if name in keys] or names[:1]
            yield from ((names, batch) for batch in file.iter_batches(at_once, columns=own))
        return
    # `datasets.save_to_disk` writes streams; a file for random access, as Feather writes it, begins with its name.
    with pyarrow.memory_map(str(path)) as source:
        is_stream = source.read(6) != b"ARROW1"
        source.seek(0)
        opened = pyarrow.ipc.open_stream(source) if is_stream else pyarrow.ipc.open_file(source)
        names = opened.schema.names
        own = [name for name in names if name in keys] or names[:1]
        parts = opened if is_stream else (opened.get_batch(at) for at in range(opened.num_record_batches))
        for part in parts:
            kept = part.select([at for at, name in enumerate(names) if name in own])
            yield from ((names, kept.slice(start, at_once)) for start in range(0, len(kept), at_once))
