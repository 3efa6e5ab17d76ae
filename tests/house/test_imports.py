"""The arrows kernels <- zero_runtime <- orchestrator <- run.py, one importer each, and what stays free of torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import zero_runtime

ROOT = Path(__file__).resolve().parents[2]
FLOORS = ("kernels", "zero_runtime", "orchestrator", "run")  # each may import itself and those before it
FILES = sorted(
    path.relative_to(ROOT)
    for top in ("kernels", "zero_runtime", "orchestrator", "run.py")
    for path in ([ROOT / top] if top.endswith(".py") else (ROOT / top).rglob("*.py"))
)
PURE = (
    "plan",
    "precision",
    "flat_layout",
    "memory_model",
    "activation_bytes",
    "offload_memory",
    "lr_schedule",
    "errors",
)
STANDARD = set(sys.stdlib_module_names)

# A plugin is a subclass of Hydra's own, in the namespace where Hydra looks for it.
PLUGIN = "orchestrator/plugins/hydra_plugins/zlab_launcher/__init__.py"
IMPORTERS = {
    "torch.distributed": {"zero_runtime/collectives.py", "zero_runtime/messages.py", "zero_runtime/runtime.py"},
    "hydra": {"orchestrator/compose.py", PLUGIN},
    "omegaconf": {"orchestrator/compose.py"},
    "submitit": {"orchestrator/launch.py", "orchestrator/slurm_executor.py"},
    "mlflow": {"orchestrator/tracking.py"},
    "transformers": {"orchestrator/workloads/models.py", "orchestrator/workloads/tokenizer.py"},
    "peft": {"orchestrator/workloads/adapters.py"},
}
# What a floor may import beside the standard library and the floors under it.
LIBRARIES = {"kernels": {"torch", "triton"}, "zero_runtime": {"torch", "numpy", "safetensors"}}


@cache
def imported(file: Path) -> set[str]:
    """Dotted names of all that a file imports or reaches as `torch.distributed`, inside functions too.

    What is imported as zero_runtime.kernels is the floor `kernels`, and `kernels` itself is Hugging Face's.
    """
    names = set(_names(ast.parse((ROOT / file).read_text(), str(file)), file))
    assert not [name for name in names if name.split(".")[0] == "kernels"], f"{file}: ours is zero_runtime.kernels"
    return {name.removeprefix("zero_runtime.") if name.startswith("zero_runtime.kernels") else name for name in names}


def _names(tree: ast.AST, file: Path) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = ".".join(file.parts[: len(file.parts) - node.level]) if node.level else ""
            module = ".".join(part for part in (package, node.module) if part)
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (node.value.id, node.attr) == ("torch", "distributed"):
                yield "torch.distributed"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            first = node.args[0]
            if isinstance(first, ast.Constant):
                yield str(first.value)
            elif isinstance(first, ast.JoinedStr) and isinstance(first.values[0], ast.Constant):
                yield str(first.values[0].value)


def floor_of(file: Path) -> str:
    return file.parts[0].removesuffix(".py")


def test_all_floors_have_files() -> None:
    assert {floor_of(file) for file in FILES} == set(FLOORS)
    assert len(FILES) > 30


@pytest.mark.parametrize("file", FILES, ids=str)
def test_imports_go_down_only(file: Path) -> None:
    above = set(FLOORS[FLOORS.index(floor_of(file)) + 1 :])
    assert {name for name in imported(file) if name.split(".")[0] in above} == set()


@pytest.mark.parametrize("library", IMPORTERS)
def test_each_library_has_its_one_importer(library: str) -> None:
    found = {
        file.as_posix()
        for file in FILES
        if any(name == library or name.startswith(f"{library}.") for name in imported(file))
    }
    assert found, f"nobody imports {library}: does this test still read imports?"
    assert found <= IMPORTERS[library]


@pytest.mark.parametrize("floor", LIBRARIES)
def test_the_lower_floors_run_on_a_machine_that_has_torch_alone(floor: str) -> None:
    allowed = LIBRARIES[floor] | STANDARD | set(FLOORS[: FLOORS.index(floor) + 1])
    for file in FILES:
        if floor_of(file) == floor:
            assert {name for name in imported(file) if name.split(".")[0] not in allowed} == set(), file


@pytest.mark.parametrize("name", PURE)
def test_pure_files_import_the_standard_library_and_each_other(name: str) -> None:
    allowed = {f"zero_runtime.{pure}" for pure in PURE}
    for module in imported(Path("zero_runtime", f"{name}.py")):
        assert module.split(".")[0] in STANDARD or ".".join(module.split(".")[:2]) in allowed, module


def modules_after(*imports: str) -> set[str]:
    """Top-level modules of a fresh interpreter after these imports, and those of the runtime's own."""
    code = f"import sys, {', '.join(imports)}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    names = run.stdout.split()
    return {name.split(".")[0] for name in names} | {name for name in names if name.startswith("zero_runtime.")}


def test_pure_files_run_without_torch() -> None:
    loaded = modules_after("zero_runtime.kernels", *(f"zero_runtime.{name}" for name in PURE))
    assert {"zero_runtime", "zero_runtime.kernels"} <= loaded
    assert not loaded & {"torch", "numpy", "safetensors", "triton"}


def test_every_public_name_of_the_runtime_is_there() -> None:
    for name in zero_runtime.__all__:
        assert getattr(zero_runtime, name).__name__ == name
    with pytest.raises(AttributeError, match="'zero_runtime' has no attribute 'ZeroPlane'"):
        zero_runtime.ZeroPlane  # noqa: B018
