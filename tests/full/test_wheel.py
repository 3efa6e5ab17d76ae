"""A wheel, of the checkout or of a source distribution, has all that `zlab` needs, and works from any folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from harness.patience import HANG_S

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("pyproject.toml", "README.md", "LICENSE", "zero_runtime", "kernels", "orchestrator", "conf", "sweeps")
POINT = (
    "model=llama_tiny data=synthetic zero=stage2 precision=fp32 resources.device=cpu resources.ranks=2 "
    "resources.threads=1 batch.seq=16 batch.micro=1 measure.validation_batches=0 measure.warmup_steps=1 "
    "measure.steps=2 tracking=none"
)


def done(*words: str | Path, cwd: Path) -> str:
    """What the command printed, both streams; it must end with 0."""
    environ = {"HOME": str(cwd), "PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
    command = list(map(str, words))
    ended = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def built(source: Path, folder: Path) -> tuple[Path, str]:
    """The wheel of a source folder, and what setuptools said."""
    pip = (sys.executable, "-m", "pip", "wheel", "--verbose", "--no-deps", "--no-build-isolation")
    said = done(*pip, "--wheel-dir", folder, source, cwd=source.parent)
    (wheel,) = folder.glob("*.whl")
    return wheel, said


def members(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, since a build leaves files beside its sources."""
    copy = tmp_path_factory.mktemp("source") / "zero-lab"
    copy.mkdir()
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, copy / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / part, copy / part)
    return copy


@pytest.mark.full
def test_the_wheel_has_every_file_of_the_program_and_setuptools_warns_of_none(source: Path, tmp_path: Path) -> None:
    wheel, said = built(source, tmp_path / "direct")
    assert "Warning" not in said
    found = members(wheel)
    places = {
        "conf": "orchestrator/shipped/conf",
        "sweeps": "orchestrator/shipped/sweeps",
        "kernels": "zero_runtime/kernels",
    }
    for part in ("zero_runtime", "kernels", "orchestrator", "conf", "sweeps"):
        for file in (path for path in (source / part).rglob("*") if path.is_file()):
            name = file.relative_to(source / part).as_posix()
            assert f"{places.get(part, part)}/{name}" in found
    done(
        sys.executable,
        "-c",
        f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})",
        cwd=source,
    )
    (archive,) = tmp_path.glob("*.tar.gz")
    shutil.unpack_archive(archive, tmp_path / "unpacked")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert members(built(unpacked, tmp_path / "from_archive")[0]) == found


@pytest.mark.full
def test_an_installed_zlab_works_from_any_folder(source: Path, tmp_path: Path) -> None:
    wheel, _ = built(source, tmp_path / "wheel")
    place, empty = tmp_path / "venv", tmp_path / "empty"
    empty.mkdir()
    done(sys.executable, "-m", "venv", "--without-pip", place, cwd=tmp_path)
    (site,) = place.glob("lib/python*/site-packages")
    site.joinpath("shared.pth").write_text(
        "\n".join(path for path in sys.path if path.endswith("site-packages")) + "\n"
    )
    python, zlab = place / "bin" / "python", place / "bin" / "zlab"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--force-reinstall")
    done(*pip, wheel, cwd=tmp_path)
    where = done(python, "-c", "import orchestrator, zero_runtime; print(orchestrator.__file__)", cwd=empty)
    assert Path(where.strip()).is_relative_to(place)
    assert "stage3" in done(zlab, "sweeps=stages", "--plan", f"output={empty / 'planned'}", cwd=Path("/"))
    assert list(empty.iterdir()) == []
    assert "ok" in done(zlab, *POINT.split(), cwd=empty)
    assert len(list(empty.glob("outputs/points/*/attempts/*/result.json"))) == 1
