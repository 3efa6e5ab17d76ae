"""Runs a subset of the suite under each platform variation that one machine can provide: `make test-platforms`.

Two variations run at a time, and each prints one line; the processor and a summary follow. The exit code is 1 if any
variation failed. Arguments select variations: `python tests/platforms/run.py kernels-aarch64 wrong-root`. Variations
that this machine cannot provide are left out, with the reason. Those that download gigabytes, and `plain`, which
`make test` contains, run only if named. The name `usual` stands for those that need none.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from platforms import environments, machine, torch_builds  # noqa: E402
from platforms.other_processor import PROCESSORS  # noqa: E402

LIMIT_S = 1200.0
AT_A_TIME = 2  # one process alone would leave cores idle: its ranks wait for each other
PYTEST = (sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "--override-ini", "addopts=")
KERNEL_TESTS = ("tests/kernels/test_ops.py", "tests/kernels/test_checksum.py")
# The kernels against the reference, stages 0 to 3 on two ranks against plain PyTorch, states in a file, a checkpoint.
CUT = (
    *(*PYTEST, *KERNEL_TESTS, "tests/kernels/test_reference.py", "tests/kernels/test_torch_optim.py"),
    *("tests/parity/test_rows.py", "tests/parity/test_offload.py", "tests/zero_runtime/checkpoint/test_load.py"),
    "-k",
    "(bits_of_the_reference and not 1000003) or odd_offsets or bits_of_ieee or derived_distance or 2-False-1]"
    " or (bf16_has_the_bits and 2-3-reduce_fp32) or 1-2-fp32 or 3-2-bf16 or tied_and_frozen",
)
PARITY = (*PYTEST, "tests/parity/test_rows.py", "-k", "fp32_has_the_bits_of_plain_torch and 2-False-1]")
KERNELS = (*PYTEST, "-p", "platforms.other_processor", *KERNEL_TESTS)
KERNELS = (
    *KERNELS,
    "-k",
    "(bits_of_the_reference and not 1000003) or odd_offsets or spread or (checksum and not flipped)",
)
# What the product asks of torch beyond its documented interface: autograd on fake tensors, and private names.
INSIDE = (*PYTEST, "tests/virtual_gpu", "tests/house/test_private_names.py")
TYPES = (sys.executable, "-m", "mypy", "--cache-dir", "{folder}/mypy")  # torch declares other types in each version
# What needs neither torch nor MLflow: the words of a command line, their composition and rules, records and reports.
WORDS = (*PYTEST, *(f"tests/orchestrator/{room}" for room in ("compose", "config", "machine", "records", "report")))
WORDS = (*WORDS, "tests/orchestrator/wings/slurm", "tests/orchestrator/text", "tests/orchestrator/planning/rules")
WORDS = (*WORDS, "tests/orchestrator/test_cli.py", "tests/orchestrator/tracking/test_addresses.py")
WORDS = (*WORDS, "-k", "not provenance_is_recorded and not sqlalchemy_2_0 and not doctor_reports")
LINES = (*PYTEST, "-m", "full or not full", "tests/orchestrator/compose")
# The command line: a run with separate rank processes, a record and a table.
SMOKE = (sys.executable, str(ROOT / "run.py"), "zero=stage2", "measure.steps=2", "measure.warmup_steps=1")
SMOKE = (*SMOKE, "resources.device=cpu", "tracking=none", "output={folder}/outputs")
NO_TESTS = {SMOKE: "smoke", TYPES: "types"}  # commands that print no count of tests
OTHER_TORCH = (TYPES, CUT, INSIDE, SMOKE)
USUAL = "usual"
COMPILERS = re.compile(r"(.*-)?(g\+\+|gcc|c\+\+|cc|clang|clang\+\+|c89|c99)(-\d+)?$")


@dataclass(frozen=True)
class Variation:
    """A name, what it changes, and commands that must pass, or whose tests must fail if `wants_red`.

    `prefix` precedes each command; `missing` is the reason why this machine cannot provide the variation. `python`
    makes an interpreter in a folder for the commands, or raises LeftOutError. `by_name`: it runs only if it is named.
    """

    name: str
    about: str
    environment: dict[str, str] = field(default_factory=dict)
    commands: tuple[tuple[str, ...], ...] = (CUT,)
    prefix: tuple[str, ...] = ()
    missing: str | None = None
    wants_red: bool = False
    empty_home: bool = False
    python: Callable[[Path], str] | None = None
    by_name: bool = False


def variations(folder: Path) -> list[Variation]:
    """All variations in the order in which they run; `folder` holds files that they need."""
    flags = machine.flags()
    lacks = {name: None if name in flags else f"this processor has no {name}" for name in ("avx2", "avx512f")}
    on_x86 = None if machine.is_x86() else "not an x86 processor"
    found = [Variation("plain", "nothing", commands=(CUT, SMOKE), by_name=True)]
    for level, flag in (("default", ""), ("avx2", "avx2"), ("avx512", "avx512f")):
        missing = on_x86 or lacks.get(flag)
        found.append(Variation(f"aten-{level}", "torch's vectors", {"ATEN_CPU_CAPABILITY": level}, missing=missing))
    # oneDNN's names next to MKL's: one run covers both libraries of matrix products.
    for mkl, onednn, flag in (("SSE4_2", "SSE41", ""), ("AVX2", "AVX2", "avx2"), ("AVX512", "AVX512_CORE", "avx512f")):
        environment = {"MKL_ENABLE_INSTRUCTIONS": mkl, "ONEDNN_MAX_CPU_ISA": onednn}
        missing = on_x86 or lacks.get(flag)
        found.append(Variation(f"products-{mkl.lower()}", "MKL and oneDNN", environment, missing=missing))
    found += [
        Variation("reference", "plain PyTorch for the kernels", {"ZLAB_KERNELS": "reference"}),
        Variation("cpp", "the C++ kernels or an error", {"ZLAB_KERNELS": "cpp"}, missing=machine.lacks_compiler()),
        Variation("no-compiler", "none on the PATH, no cache", no_compiler(folder), (PARITY, SMOKE), empty_home=True),
        *(Variation(f"threads-{n}", "OMP_NUM_THREADS", {"OMP_NUM_THREADS": str(n)}) for n in (2, 4)),  # the suite: 1
        user(folder),
        Variation("ascii", "LC_ALL=C, no UTF-8 mode", ASCII, (PARITY, SMOKE)),
        no_network_names(),
        Variation("wrong-root", "torch.sqrt errs in the last place", faulty("root"), (CUT, SMOKE)),
        Variation("wrong-kernel", "AdamW errs in the last place", faulty("kernel"), (PARITY,), wants_red=True),
    ]
    found += [
        Variation("torch-cpu", "a CPU build", commands=OTHER_TORCH, python=torch_builds.cpu),
        Variation("torch-lowest", "", commands=OTHER_TORCH, python=torch_builds.lowest, by_name=True),
        Variation("torch-highest", "", commands=OTHER_TORCH, python=torch_builds.highest, by_name=True),
    ]
    found.append(Variation("hydra-1.4", "", commands=(LINES, SMOKE), python=environments.with_hydra))
    for version in (one for one in environments.VERSIONS if one != environments.HERE):
        words, training = (
            partial(make, version=version) for make in (environments.with_words, environments.with_training)
        )
        found.append(Variation(f"python-{version}", "no torch, no MLflow", commands=(WORDS,), python=words))
        found.append(Variation(f"training-{version}", "", commands=(CUT, SMOKE), python=training, by_name=True))
    for name, processor in PROCESSORS.items():
        about = f"kernels compiled with {processor.flags[0]}" + (", under QEMU" if processor.emulator else "")
        environment = {"ZLAB_PROCESSOR": name, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
        missing = processor.missing()
        found.append(Variation(f"kernels-{name}", about, environment, (KERNELS,), missing=missing))
    return found


ASCII = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}


def faulty(what: str) -> dict[str, str]:
    """Environment that gives every process of the run the fault; see hooks/sitecustomize.py."""
    wanted = {"PYTHONPATH": str(HERE / "hooks"), "ZLAB_FAULTY": what}
    return wanted | ({"ZLAB_KERNELS": "cpp"} if what == "kernel" else {})


def no_compiler(folder: Path) -> dict[str, str]:
    """Environment whose PATH has every tool of the current one except compilers."""
    place = folder / "bin"
    place.mkdir()
    for name in os.environ.get("PATH", "").split(os.pathsep):
        for tool in sorted(Path(name).iterdir()) if Path(name).is_dir() else ():
            if not COMPILERS.match(tool.name) and not (place / tool.name).exists():
                (place / tool.name).symlink_to(tool)
    return {"PATH": str(place), "CXX": ""}


def user(folder: Path) -> Variation:
    """Another user, with a separate home folder and a checkout that it may only read."""
    number = "65534"
    prefix = ["setpriv", "--reuid", number, "--regid", number, "--clear-groups", "--bounding-set", "-all"]
    about = "an ordinary user, the checkout read-only"
    missing = None if os.geteuid() == 0 else "it needs root to become another user"
    missing = missing or (None if shutil.which("setpriv") else "no setpriv on the PATH")
    same = f"import sys; assert sys.version == {sys.version!r}; open({str(ROOT / 'run.py')!r})"
    probe = [*prefix, "--inh-caps", "-all", sys.executable, "-c", same]
    if missing is None and subprocess.run(probe, capture_output=True, cwd="/").returncode != 0:
        # The interpreter or the checkout is in a folder that only root may read: the user may read it, no more.
        reading = "+dac_read_search"
        prefix[-1] = f"-all,{reading}"
        prefix += ["--inh-caps", f"-all,{reading}", "--ambient-caps", f"-all,{reading}"]
        about += ", allowed to read root's folders"
    else:
        prefix += ["--inh-caps", "-all"]
    owned = {"USER": "nobody", "LOGNAME": "nobody"}
    return Variation("ordinary-user", about, owned, (PARITY, SMOKE), tuple(prefix), missing, empty_home=True)


def no_network_names() -> Variation:
    """Only a loopback interface, and a host name that does not resolve."""
    missing = None
    inside = 'ip link set lo up && hostname no-such-name && exec "$@"'
    prefix = ("unshare", "--net", "--uts", "sh", "-c", inside, "sh")
    if subprocess.run(["sh", "-c", "command -v unshare && command -v ip"], capture_output=True).returncode != 0:
        missing = "no unshare or no ip on the PATH"
    elif subprocess.run([*prefix, "true"], capture_output=True).returncode != 0:
        missing = "namespaces of its own need root"
    about = "no network, a host name that leads nowhere"
    return Variation("no-names", about, commands=(PARITY, SMOKE), prefix=prefix, missing=missing)


# ---- running ---------------------------------------------------------------------------------------------------------


def run(one: Variation, folder: Path) -> tuple[bool, str]:
    """Whether the variation went as expected, and its test counts; prints the output of a command that did not.

    LeftOutError with the reason if the variation's interpreter cannot be made.
    """
    place = folder / one.name
    (place / "tmp").mkdir(parents=True)
    own = {"TMPDIR": str(place / "tmp"), "ZLAB_LOCKS": str(place / "tmp" / "locks"), "PYTHONDONTWRITEBYTECODE": "1"}
    environment = {**os.environ, **own, **one.environment}
    if one.empty_home:
        environment |= {"HOME": str(place), "XDG_CACHE_HOME": ""}
    if one.prefix and "setpriv" in one.prefix[0]:
        for path in (place, place / "tmp"):
            os.chown(path, 65534, 65534)
    python = one.python(place / "python") if one.python else sys.executable
    counted = [f"torch {torch_builds.version(python)}"] if one.python else []
    for words in one.commands:
        command = [*one.prefix, python, *(word.format(folder=place) for word in words[1:])]
        done = _run(command, environment)
        told = done.stdout.decode("utf-8", "replace")
        summary = re.findall(r"\d+ (?:passed|failed|skipped|error)", told)
        counted += summary or ([NO_TESTS[words]] if words in NO_TESTS else [])
        wanted = 1 if one.wants_red else 0
        if done.returncode != wanted or (not summary and words not in NO_TESTS):
            print(f"---- {one.name}: exit code {done.returncode}, expected {wanted}\n{told[-6000:]}", flush=True)
            return False, ", ".join(counted)
        if one.wants_red and "assert_same_bits" not in told:
            print(f"---- {one.name}: red for another reason than its bits\n{told[-6000:]}", flush=True)
            return False, ", ".join(counted)
    return True, ", ".join(counted)


def _run(command: Sequence[str], environment: dict[str, str]) -> subprocess.CompletedProcess[bytes]:
    try:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.run(command, cwd=ROOT, env=environment, timeout=LIMIT_S, **streams)  # type: ignore[call-overload, no-any-return]
    except subprocess.TimeoutExpired as error:
        return subprocess.CompletedProcess(command, 124, error.stdout or b"", b"")


def main(names: Sequence[str]) -> int:
    """Exit code 0: every variation that could run went as expected. 1: one did not. 2: an unknown name."""
    with tempfile.TemporaryDirectory(prefix="zlab-platforms-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        every = variations(folder)
        usual = [one.name for one in every if not one.by_name]
        names = [name for asked in names or [USUAL] for name in (usual if asked == USUAL else [asked])]
        unknown = set(names) - {one.name for one in every}
        if unknown:
            known = " ".join([USUAL, *(one.name for one in every)])
            print(f"error: expected names of variations, found {' '.join(sorted(unknown))}\nknown: {known}")
            return 2
        chosen = [one for one in every if one.name in names]
        here = f"processor  {machine.describe()}\ntorch      {torch_builds.version()}"
        print(here, flush=True)
        start = time.monotonic()
        with ThreadPoolExecutor(AT_A_TIME) as pool:
            verdicts = list(pool.map(partial(_told, folder=folder), chosen))
    print(here)
    left_out, failed = (
        [one.name for one, told in zip(chosen, verdicts, strict=True) if told == what]
        for what in ("left out", "FAILED")
    )
    ran = len(chosen) - len(left_out)
    print(f"platforms  {ran - len(failed)} of {ran} variations passed in {time.monotonic() - start:.0f} s", end="")
    print(f"; left out: {', '.join(left_out) or 'none'}; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def _told(one: Variation, folder: Path) -> str:
    """Runs the variation if this machine can, and prints its line; returns "passed", "FAILED" or "left out"."""
    began = time.monotonic()
    try:
        if one.missing:
            raise torch_builds.LeftOutError(one.missing)
        passed, counted = run(one, folder)
    except torch_builds.LeftOutError as reason:
        print(f"{one.name:18} left out: {reason}", flush=True)
        return "left out"
    finally:
        shutil.rmtree(folder / one.name / "python", ignore_errors=True)
    changed = " ".join(f"{key}={value}" for key, value in one.environment.items() if "/" not in value)
    verdict = "passed" if passed else "FAILED"
    red = f" (red{' as it should be' if passed else ''})" if one.wants_red else ""
    took = time.monotonic() - began
    print(f"{one.name:18} {verdict}{red} {took:4.0f} s  {one.about}  {changed}  [{counted}]", flush=True)
    return verdict


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
