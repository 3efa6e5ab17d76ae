"""Samples are the same at every world size, are read once per epoch, and keep training and validation separate."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.workloads.data import TokenData, epoch_order, load_data, slice_for_rank, split
from orchestrator.workloads.sources import STDLIB_BYTES, read_stdlib, stdlib_files

SEQ = 16
REPOSITORY = Path(__file__).resolve().parents[3]


def load(kind: str = "text", path: Path | None = None, **changes: Any) -> TokenData:
    settings: dict[str, Any] = {"seq": SEQ, "seed": 7, "vocab_size": 256, "validation_fraction": 0.1}
    return load_data(kind, str(path) if path else None, **(settings | changes))


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """100 windows and 5 more bytes; random bytes make every window unique."""
    path = tmp_path / "book.txt"
    path.write_bytes(np.random.default_rng(0).integers(1, 256, 100 * (SEQ + 1) + 5, dtype=np.uint8).tobytes())
    return path


def rows(batch: Any) -> list[tuple[int, ...]]:
    """Complete windows: the inputs and the last label."""
    return [(*inputs, labels[-1]) for inputs, labels in zip(batch[0].tolist(), batch[1].tolist(), strict=True)]


@pytest.mark.parametrize("kind", ["text", "synthetic", "stdlib"])
def test_labels_are_the_inputs_shifted_by_one(kind: str, book: Path) -> None:
    data = load(kind, book if kind == "text" else None)
    for inputs, labels in (data.train_batch(3, 5), data.validation_batch(0, 5)):
        assert inputs.shape == labels.shape == (5, SEQ)
        assert inputs.dtype == labels.dtype == np.int64
        assert (inputs[:, 1:] == labels[:, :-1]).all()
        assert min(inputs.min(), labels.min()) >= 0
        assert max(inputs.max(), labels.max()) < 256


def test_a_window_is_a_contiguous_piece_of_the_text(book: Path) -> None:
    text = book.read_bytes()
    for window in rows(load(path=book).train_batch(0, 20)):
        start = text.index(bytes(window))
        assert start % (SEQ + 1) == 0


@pytest.mark.parametrize("kind", ["text", "synthetic"])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 6])
def test_the_global_batch_is_the_same_at_every_world_size(kind: str, world: int, book: Path) -> None:
    data, position, size = load(kind, book if kind == "text" else None), 84, 12
    slices = [slice_for_rank(size, rank, world) for rank in range(world)]
    parts = [data.train_batch(position + offset, count) for offset, count in slices]
    whole = data.train_batch(position, size)
    assert (np.concatenate([part.input_ids for part in parts]) == whole.input_ids).all()
    assert (np.concatenate([part.labels for part in parts]) == whole.labels).all()


def test_an_epoch_reads_every_training_window_once_and_each_epoch_has_its_own_order(book: Path) -> None:
    data = load(path=book)
    assert (data.train_samples, data.validation_samples) == (90, 10)
    first, second = rows(data.train_batch(0, 90)), rows(data.train_batch(90, 90))
    assert len(set(first)) == 90
    assert sorted(first) == sorted(second)
    assert first != second
    assert sorted(epoch_order(1000, 7, 3).tolist()) == list(range(1000))
    assert (epoch_order(1000, 7, 3) != epoch_order(1000, 8, 3)).any()


def test_a_batch_may_span_several_epochs(book: Path) -> None:
    data = load(path=book)
    one_by_one = [row for position in range(300) for row in rows(data.train_batch(position, 1))]
    assert rows(data.train_batch(0, 300)) == one_by_one
    assert rows(data.train_batch(85, 10)) == one_by_one[85:95]


def test_no_token_is_in_both_training_and_validation(book: Path) -> None:
    data = load(path=book)
    both = np.concatenate([data.train_windows, data.validation_windows])
    assert sorted(both.tolist()) == list(range(100))  # disjoint windows of seq + 1 tokens, each on one side
    held_out = set(rows(data.validation_batch(0, 10)))
    assert len(held_out) == 10
    assert not held_out & set(rows(data.train_batch(0, 90)))


def test_the_split_is_exact_and_evenly_spread_and_leaves_no_requested_side_empty() -> None:
    for count, fraction, held in ((100, 0.05, 5), (100, 0.0, 0), (2, 0.05, 1), (2, 0.99, 1), (1000, 0.3, 300)):
        train, validation = split(count, fraction)
        assert len(validation) == held
        assert len(train) == count - held
    assert np.diff(split(1000, 0.05)[1]).tolist() == [20] * 49


def test_validation_keeps_its_order_and_restarts_after_the_last_window(book: Path) -> None:
    data = load(path=book)
    once = rows(data.validation_batch(0, 10))
    assert once == rows(load(path=book, seed=8).validation_batch(0, 10))
    assert rows(data.validation_batch(8, 4)) == once[8:] + once[:2]


@pytest.mark.parametrize("kind", ["stdlib", "synthetic"])
def test_another_process_reads_the_same_samples(kind: str) -> None:
    program = (
        "from orchestrator.workloads.data import load_data\n"
        f"data = load_data({kind!r}, None, seq={SEQ}, seed=7, vocab_size=256, validation_fraction=0.1)\n"
        "print(data.hash, data.train_batch(10**6, 3).labels.tolist())"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    data = load(kind)
    assert run.stdout.strip() == f"{data.hash} {data.train_batch(10**6, 3).labels.tolist()}"


def test_the_order_of_samples_never_changes_between_versions() -> None:
    assert epoch_order(8, 1234, 0).tolist() == [0, 4, 3, 2, 5, 1, 6, 7]
    assert load("synthetic", seed=1234).hash == "70dc088e9e98"
    assert load("synthetic", seed=1234, seq=6).train_batch(0, 1).labels.tolist() == [[27, 28, 29, 30, 31, 0]]


def test_the_hash_depends_on_the_tokens_and_on_how_they_are_split(book: Path) -> None:
    text = bytearray(book.read_bytes())
    whole = load(path=book).hash
    assert len(whole) == 12
    assert int(whole, 16) >= 0
    assert load(path=book, seed=8).hash == whole
    assert load(path=book, seq=SEQ + 1).hash != whole
    assert load(path=book, validation_fraction=0.2).hash != whole
    text[50] ^= 1
    book.write_bytes(text)
    assert load(path=book).hash != whole
    assert len({load("synthetic", seed=seed, vocab_size=vocab).hash for seed in (7, 8) for vocab in (256, 300)}) == 4


def test_a_folder_is_read_as_its_text_files_in_the_order_of_their_paths(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "b" / "one").write_bytes(b"\xff\xfe" * 30)
    (tmp_path / "a.txt").write_bytes(b"a" * 40)
    for binary in ("c.bin", ".hidden/x", "b/.y"):
        (tmp_path / binary).write_bytes(b"\0" * 100)
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    data = load(path=tmp_path, seq=99, validation_fraction=0)
    assert bytes(rows(data.train_batch(0, 1))[0]) == b"a" * 40 + b"\xff\xfe" * 30
    assert data.validation_samples == 0


def test_the_hash_of_a_text_does_not_depend_on_its_path(book: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "other"
    elsewhere.mkdir()
    copy = elsewhere / "copy.txt"
    copy.write_bytes(book.read_bytes())
    assert load(path=copy).hash == load(path=book).hash
    assert load(path=copy).name == "text:copy.txt"


def test_the_standard_library_is_read_without_tests_installed_or_generated_files(tmp_path: Path) -> None:
    kept = ("abc.py", "json/__init__.py", "json/decoder.py", "os.py")
    for name in (
        *kept,
        *("json/__pycache__/x.py", "test/__init__.py", "json/tests/__init__.py", "site-packages/a/__init__.py"),
        *("idlelib/__init__.py", "_sysconfigdata__linux.py", "sitecustomize.py", "config-3.11/python-config.py"),
        "json/data.txt",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    assert [path.relative_to(tmp_path).as_posix() for path in stdlib_files(tmp_path)] == list(kept)
    assert len(read_stdlib(STDLIB_BYTES)) <= STDLIB_BYTES
    assert load("stdlib").train_samples > 10_000


def test_synthetic_tokens_can_be_learned() -> None:
    inputs, labels = load("synthetic", vocab_size=5000, seq=64).train_batch(0, 200)
    assert 0.85 < np.isin((labels - inputs) % 625, (1, 2, 3, 4)).mean() < 0.95
    assert 0.93 < (labels < 625).mean() < 0.98
    assert labels.max() > 4000


def test_a_path_with_nothing_is_reported() -> None:
    with pytest.raises(ValueError, match="none at /nowhere/at/all"):
        load("text", path=Path("/nowhere/at/all"))


def test_too_little_text_is_reported_with_the_bytes_that_are_needed(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="expected text, found nothing"):
        load(path=path)
    path.write_bytes(b"x" * 33)
    with pytest.raises(ValueError, match=r"at least 34 bytes .* found 33 in text:short.txt"):
        load(path=path)
    path.write_bytes(b"x" * 34)
    assert (load(path=path).train_samples, load(path=path).validation_samples) == (1, 1)
    folder = tmp_path / "empty"
    folder.mkdir()
    with pytest.raises(ValueError, match="expected text, found nothing"):
        load(path=folder)


def test_ranks_read_contiguous_slices_of_a_global_batch() -> None:
    assert [slice_for_rank(12, rank, 3) for rank in range(3)] == [(0, 4), (4, 4), (8, 4)]
