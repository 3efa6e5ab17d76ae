"""Checks a YAML file before it is read: it must be a regular file of bounded size, with a bounded number of values.

Readers expand aliases, so a file of ten lines may need more memory than any machine has. The limits are counts and not
seconds or bytes of memory, so that a file is accepted on every machine or on none.
"""

from __future__ import annotations

from pathlib import Path

import yaml

MOST_BYTES = 4 << 20  # four times a sweep of 10,000 points with one line each
MOST_VALUES = 200_000
TOO_DEEP = (
    "expected settings in a few levels, found thousands, or an alias inside what it stands for; write the values out"
)


def check(path: Path) -> None:
    """Raises ValueError, or PyYAML's own error, for a file that must not be read. A missing file passes."""
    where = f"{path.parent.name}/{path.name}"
    if not path.exists():
        return
    if not path.is_file():  # reading a pipe may never end
        raise ValueError(f"{where}: expected a file of settings, found {'a folder' if path.is_dir() else 'no file'}")
    if (size := path.stat().st_size) > MOST_BYTES:
        raise ValueError(f"{where}: expected settings of at most {MOST_BYTES >> 20} MiB, found {size >> 20} MiB")
    data = path.read_bytes()
    if b"*" not in data:
        return
    try:
        node = yaml.compose(data.decode("utf-8"), yaml.SafeLoader)
    except UnicodeDecodeError:
        return  # the reader reports it
    if node is not None and (count := _values(node, {})) > MOST_VALUES:
        raise ValueError(
            f"{where}: expected at most {MOST_VALUES:,} values, found aliases that stand for {_told(count)}; "
            "write the values out"
        )


def _values(node: yaml.Node, known: dict[int, int]) -> int:
    """The number of values of a node with its aliases expanded. RecursionError if an alias is inside its own value."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) not in known:
        inner = node.value if isinstance(node, yaml.SequenceNode) else [one for pair in node.value for one in pair]
        known[id(node)] = 1 + sum(_values(one, known) for one in inner)
    return known[id(node)]


def _told(count: int) -> str:
    return f"{count:,}" if count < 10**15 else f"about 10^{len(str(count)) - 1}"
