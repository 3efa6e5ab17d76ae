"""The compiled library is built once under a lock into a private cache, never at import; if it cannot be built, the
reference runs."""

from __future__ import annotations

import fcntl
import logging
import multiprocessing as mp
import os
import stat
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch
from harness.patience import HANG_S

from zero_runtime.kernels import reference, registration
from zero_runtime.kernels.cpu import build, operations
from zero_runtime.kernels.cpu.build import BuildError, LockWait
from zero_runtime.kernels.user_cache import cache_folder

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
# A source that compiles quickly, so that the compiler does not dominate what is timed and counted here.
SOURCE = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A separate source folder and cache for the test. Returns the path of the only source."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "one.cpp").write_text(SOURCE)
    monkeypatch.setattr(build, "SOURCES", folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    try:
        build.library_key(build.find_compiler())
    except BuildError as error:
        pytest.skip(str(error))
    return folder / "one.cpp"


def libraries() -> list[Path]:
    return sorted(cache_folder().glob("*.so"))


def counting_compiler(folder: Path, script: str = 'exec g++ "$@"') -> Path:
    """A compiler that writes a line for each compilation into the file `count` next to it."""
    path = folder / "compiler"
    path.write_text(
        f'#!/bin/sh\ncase "$1" in --version) echo stub; exit 0;; esac\necho x >> {folder}/count\n{script}\n'
    )
    path.chmod(0o755)
    return path


def compilations(folder: Path) -> int:
    count = folder / "count"
    return len(count.read_text().splitlines()) if count.exists() else 0


def test_import_compiles_and_loads_nothing(tmp_path: Path) -> None:
    code = "import zero_runtime.kernels.ops, sys; assert 'triton' not in sys.modules"
    subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)}, check=True
    )
    assert list(tmp_path.iterdir()) == []


def test_the_second_load_uses_the_library_that_the_first_compiled(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(counting_compiler(tmp_path)))
    assert build.load_library().answer() == 42
    assert build.load_library().answer() == 42
    assert compilations(tmp_path) == 1
    assert not list(cache_folder().glob("*.part"))


def test_only_the_user_can_access_the_cache(sources: Path) -> None:
    assert stat.S_IMODE(cache_folder().stat().st_mode) == 0o700


def test_another_source_flag_compiler_or_processor_gives_another_library(
    sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = build.find_compiler()
    keys = {build.library_key(compiler)}
    sources.write_text(SOURCE + "// changed\n")
    keys.add(build.library_key(compiler))
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DOTHER"))
    keys.add(build.library_key(compiler))
    monkeypatch.setattr(build, "_version", lambda _: "another")
    keys.add(build.library_key(compiler))
    monkeypatch.setattr(build, "_processor", lambda: "another")
    keys.add(build.library_key(compiler))
    assert len(keys) == 5


def test_a_cache_folder_that_others_can_write_to_is_refused(sources: Path) -> None:
    cache_folder().chmod(0o777)
    with pytest.raises(BuildError, match="writable to nobody else"):
        build.load_library()


def test_a_cache_that_cannot_be_created_is_an_error_that_names_the_variable(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(BuildError, match="set XDG_CACHE_HOME"):
        build.load_library()


def test_without_a_writable_home_the_cache_is_in_the_temporary_folder(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
    # No user can create folders in /proc, and expanduser returns "~" if it knows no home.
    for home in ("/proc", str(sources), "~"):
        monkeypatch.setattr(os.path, "expanduser", lambda path, home=home: home)
        assert cache_folder() == tmp_path / "temporary" / f"zero-lab-{os.getuid()}"
    assert stat.S_IMODE(cache_folder().stat().st_mode) == 0o700
    assert not Path("~").exists()
    monkeypatch.setattr(os.path, "expanduser", lambda path: str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "zero-lab"


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:4096])  # the loader maps such a file and crashes


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": _cut,
    "one bit": _flip,
    "another": lambda path: path.write_bytes(b"not a library"),
    "gone": lambda path: path.unlink(),
    "no checksum": lambda path: path.with_suffix(".sha256").unlink(),
    "a torn checksum": lambda path: path.with_suffix(".sha256").write_bytes(b""),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_library_is_compiled_again_and_never_loaded(
    damage: str, sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", str(counting_compiler(tmp_path)))
    path = cache_folder() / f"kernels-{build.library_key(build.find_compiler())}.so"
    build.compile_library(build.find_compiler(), path)
    assert build._verifies(path)
    DAMAGE[damage](path)
    assert not build._verifies(path)
    assert build.load_library().answer() == 42
    assert build._verifies(path)
    assert compilations(tmp_path) == 2
    assert caplog.text == ""
    assert not [*cache_folder().glob("*.part"), *cache_folder().glob("*.sum")]


@pytest.mark.usefixtures("fresh_choice")
def test_kernels_with_wrong_results_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def accumulate_(target: torch.Tensor, values: torch.Tensor, scale: float) -> None:
        reference.accumulate_(target, values, 1.01 * scale)

    try:
        operations.library()
    except BuildError as error:
        pytest.skip(str(error))
    monkeypatch.setattr(operations, "accumulate_", accumulate_)
    assert not registration.prepare(CPU)
    assert "compiled here, its results are off by up to" in caplog.text


# ---- the lock --------------------------------------------------------------------------------------------------------


def _load_and_answer(results: mp.SimpleQueue) -> None:  # type: ignore[type-arg]
    results.put(build.load_library().answer())


def test_processes_that_start_together_compile_once(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(counting_compiler(tmp_path, 'sleep 0.5; exec g++ "$@"')))
    context = mp.get_context("fork")
    results = context.SimpleQueue()
    processes = [context.Process(target=_load_and_answer, args=(results,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(HANG_S)
    assert [results.get() for _ in processes] == [42, 42, 42]
    assert compilations(tmp_path) == 1


def lock_path() -> Path:
    return cache_folder() / f"kernels-{build.library_key(build.find_compiler())}.lock"


def test_a_leftover_lock_file_that_no_process_holds_is_ignored(sources: Path, caplog: pytest.LogCaptureFixture) -> None:
    lock_path().touch()
    assert build.load_library(LockWait(limit_s=0.5, message_after_s=0.0)).answer() == 42
    assert "waiting for another process" not in caplog.text
    assert "compiling without it" not in caplog.text


def test_a_waiting_process_logs_it_and_after_the_limit_compiles_without_the_lock(
    sources: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with lock_path().open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert build.load_library(LockWait(limit_s=0.5, message_after_s=0.1)).answer() == 42
    assert "waiting for another process that compiles the CPU kernels" in caplog.text
    assert "still held after 0 s; compiling without it" in caplog.text


# ---- without a compiler ----------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the test make choices that a process makes only once; afterwards the earlier choices apply again."""
    monkeypatch.delenv("ZLAB_KERNELS", raising=False)
    monkeypatch.setattr(registration, "_prepared", cache(registration._prepared.__wrapped__))
    monkeypatch.setattr(operations, "library", cache(operations.library.__wrapped__))


@pytest.mark.usefixtures("sources", "fresh_choice")
def test_without_a_compiler_one_warning_gives_the_reason_and_the_reference_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not registration.prepare(CPU)
    assert not registration.prepare(CPU)
    (record,) = (record for record in caplog.records if record.levelno >= logging.WARNING)
    assert "expected a C++ compiler (no-such-compiler) on the PATH, found none; install g++" in record.getMessage()


@pytest.mark.usefixtures("fresh_choice")
def test_a_failed_compilation_reports_the_compilers_message_and_leaves_no_files(
    sources: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sources.write_text("this is no C++;\n")
    assert not registration.prepare(CPU)
    assert "failed with exit status 1" in caplog.text
    assert "one.cpp:1:1: error" in caplog.text
    assert libraries() == []
    assert not list(cache_folder().glob("*.part"))


@pytest.mark.usefixtures("sources", "fresh_choice")
def test_requiring_cpp_without_a_compiler_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("ZLAB_KERNELS", "cpp")
    with pytest.raises(BuildError, match="no-such-compiler"):
        registration.prepare(CPU)


@pytest.mark.usefixtures("fresh_choice")
def test_a_processor_without_fused_multiply_add_uses_the_reference(
    sources: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> str:
        raise BuildError("expected a processor with AVX2, FMA and F16C, found one without")

    monkeypatch.setattr(build, "_processor", refuse)
    assert not registration.prepare(CPU)


def test_a_compiler_that_hangs_times_out(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(counting_compiler(tmp_path, "exec sleep 30")))
    monkeypatch.setattr(build, "COMPILE_LIMIT_S", 0.3)
    with pytest.raises(BuildError, match="timed out after"):
        build.load_library()
