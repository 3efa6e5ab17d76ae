"""Any checkpoint folder is read as it was written or refused with its path, and nothing that it names is called."""

from __future__ import annotations

import json
import math
import random
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import odd
import odd_yaml
import pytest
import torch
from harness.attack_counts import Tally
from harness.checkpoints import Setting, save_after
from harness.models import TinySpec, TinyTransformer
from harness.ranks import run_ranks
from safetensors.torch import save_file
from sandbox import TENSORS
from trials import Trial, Wrong, attack, numbers

from zero_runtime.checkpoint.files import WEIGHTS, WEIGHTS_INDEX
from zero_runtime.checkpoint.hugging_face.source import WeightsFolder
from zero_runtime.checkpoint.layout import INDEX, checksum_text
from zero_runtime.checkpoint.load import CheckpointReader
from zero_runtime.deepspeed.foreign_checkpoints.deepspeed import open_deepspeed
from zero_runtime.errors import CheckpointError

DOOR = "checkpoint folders"
OWN = "step-00000003"
MADE = Path(__file__).resolve().parents[1] / "foreign" / "deepspeed"  # written by tests/foreign/make_deepspeed.py
KEYS = ["step", "world", "ranks", "parameters", "files", "pieces", "shape", "dtype", "states", "weight_map"]
KEYS += ["data_offsets", "trainer", "rng", "format", "version", "bytes", "checksum", "__metadata__"]
KEYS += ["../x", "/etc/passwd", "a\0b", ""]
Values = dict[str, torch.Tensor]


def read_own(folder: Path) -> Values:
    with CheckpointReader.open(folder) as found:
        values = {
            f"{state}/{name}": source.read(name, 0, math.prod(source.shape(name)))
            for state in ("master", *found.index.optimizer.states)
            for source in [found.state(state)]
            for name in source.names()
        }
        return {**values, **found.buffers()}


def read_weights(folder: Path) -> Values:
    with WeightsFolder(folder) as found:
        return {name: found.read(name, 0, math.prod(found.shape(name))) for name in found.names()}


def read_foreign(folder: Path) -> Values:
    found = open_deepspeed(folder)
    found.verify()
    return {
        f"{state}/{name}": source.read(name, 0, math.prod(found.parameters[name]))
        for state, source in ((state, found.source(state)) for state in found.chunks)
        for name in source.names()
    }


READERS: dict[str, Callable[[Path], Values]] = {
    OWN: read_own,
    **{f"stage{stage}": read_foreign for stage in (1, 2, 3)},
    "one-file": read_weights,
    "two-files": read_weights,
}


def _save(root: Path) -> None:
    save_after(root, Setting(world=2, stage=2), model=TinySpec(width=8, vocab=11))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One undamaged checkpoint folder of each kind."""
    root = tmp_path_factory.mktemp("checkpoints")
    run_ranks(_save, 2, root)
    for stage in (1, 2, 3):
        shutil.copytree(MADE / f"stage{stage}", root / f"stage{stage}")
    values = {name: param.detach().clone() for name, param in TinyTransformer(TinySpec(width=8)).named_parameters()}
    for name, parts in (("one-file", [WEIGHTS]), ("two-files", ["a.safetensors", "b.safetensors"])):
        (root / name).mkdir()
        places = {key: parts[number % len(parts)] for number, key in enumerate(values)}
        for part in parts:
            save_file({key: values[key] for key, file in places.items() if file == part}, root / name / part)
        if len(parts) > 1:
            (root / name / WEIGHTS_INDEX).write_text(json.dumps({"weight_map": places}))
    return root


def reshaped(data: bytes, chance: random.Random) -> bytes:
    """`data` with other values, keys and shapes in its JSON or in its safetensors header."""
    size = int.from_bytes(data[:8], "little")
    has_header = data[8:9] == b"{" and size < len(data)
    text = data[8 : 8 + size] if has_header else data
    try:
        found = odd_yaml.reshaped(json.loads(text), KEYS, chance)
        text = json.dumps(found, default=str).encode()
    except (ValueError, UnicodeError):
        return odd.changed(data, chance)
    return len(text).to_bytes(8, "little") + text + data[8 + size :] if has_header else text


def signed(folder: Path) -> None:
    """Gives a folder in our own format matching checksums, as someone who damages it on purpose would."""
    if not (folder / INDEX).exists():
        return
    rest = (folder / INDEX).read_bytes().partition(b"\n")[2]
    try:
        index = json.loads((folder / INDEX).read_bytes())
        for name, entry in index["files"].items():
            data = (folder / name).read_bytes()
            entry |= {"bytes": len(data), "checksum": checksum_text(zlib.crc32(data))}
        del index["checksum"]
        rest = json.dumps(index, separators=(",", ":")).encode()[1:]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass  # the index itself was damaged
    first = f'{{"checksum":"{checksum_text(zlib.crc32(rest))}",'.encode()
    (folder / INDEX).write_bytes(first + b"\n" + rest)


def damage(folder: Path, chance: random.Random) -> tuple[str, bool]:
    """Damages a file of the folder; returns a description, and whether a checksum of its original bytes remains."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if not files:
        return "nothing left", False
    file = chance.choice([*files, *(path for path in files if path.stat().st_size < 20_000)])
    what, data = chance.random(), file.read_bytes()
    if what < 0.05:
        file.unlink()
    elif what < 0.1:
        file.write_bytes(chance.choice(files).read_bytes())
    elif what < 0.4:
        file.write_bytes(reshaped(data, chance))
    else:
        file.write_bytes(odd.changed(data, chance))
    sealed = folder.name == OWN
    if folder.name == OWN and chance.random() < 0.7:
        signed(folder)
        sealed = False
    size = file.stat().st_size if file.exists() else "no"
    return f"{file.relative_to(folder)}: {len(data)} bytes became {size}{'' if sealed else ', signed'}", sealed


@pytest.mark.parametrize("tried", numbers(40, 2450))
def test_any_checkpoint_folder_is_read_or_refused_with_its_path(
    tried: list[int], folders: Path, tmp_path: Path, tally: Tally
) -> None:
    wanted = {name: read(folders / name) for name, read in READERS.items()}

    def case(trial: Trial) -> None:
        name = trial.chance.choice(list(READERS))
        folder = tmp_path / name
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(folders / name, folder)
        done = [damage(folder, trial.chance) for _ in range(trial.chance.choice((1, 1, 1, 2)))]
        trial.shown = f"{name}: {'; '.join(what for what, _ in done)}"
        try:
            found = trial.watched(lambda: READERS[name](folder), may_import=TENSORS)
        except CheckpointError as error:
            judge(str(error), folder)
        else:
            if all(sealed for _, sealed in done):
                assert found.keys() == wanted[name].keys()
                assert all(torch.equal(values, found[key]) for key, values in wanted[name].items()), "other values"

    attack(DOOR, tried, tally, case)


def judge(text: str, folder: Path) -> None:
    if str(folder) not in text or len(text) > 6000 or "; " not in text:
        raise Wrong("unclear messages", f"expected a path, a reason and advice in a few lines, found {text[:600]!r}")
