"""Imports only go down: kernels <- zero_runtime <- orchestrator <- run.py.

Each external library also has a fixed set of files that may import it, and the pure files import no torch.
"""

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
    "activations.rule",
    "checkpoint.files",
    "dtype_rules",
    "state_bytes",
    "predict.messages",
    "predict.memory.activation_count",
    "predict.memory.caching_allocator",
    "predict.memory.counted_unit",
    "predict.memory.device_overhead",
    "predict.memory.outside_step",
    "predict.memory.paper_formulas",
    "predict.memory.peer_deepspeed",
    "predict.memory.peer_reserved",
    "predict.memory.peers",
    "predict.memory.repeated_blocks",
    "predict.memory.reserved",
    "predict.memory.step_memory",
    "predict.timing.costs",
    "predict.timing.data_sheet",
    "predict.timing.segments",
    "predict.timing.step_clock",
    "predict.timing.step_time",
    "predict.timing.timed_unit",
    "predict.timing.work",
    "same_host.sizes",
    "schedule",
    "parallel.tensor.refusals",
    "offload.memory",
    "offload_plan",
    "optim.config_base",
    "optim.configs",
    "optim.groups",
    "optim.matrix_owners",
    "optim.loss_scaler",
    "optim.lr_schedule",
    "optim.lr_settings",
    "backward_tracker",
    "shared_backward",
    "errors",
    "limits",
    "wire",
)
STANDARD = set(sys.stdlib_module_names)

IMPORTERS = {
    "torch.distributed": {
        "orchestrator/wings/engines/ddp.py",
        "orchestrator/wings/engines/deepspeed.py",
        "orchestrator/wings/engines/foreign_runtime.py",
        "orchestrator/wings/engines/messages.py",
        "orchestrator/wings/engines/fsdp2.py",
        "orchestrator/wings/scripts/held_store.py",
        "orchestrator/wings/engines/torch_optimizer.py",
        "zero_runtime/collectives.py",
        "zero_runtime/deepspeed/comm.py",
        "zero_runtime/gloo.py",
        "zero_runtime/own_device.py",
        "zero_runtime/same_host/group.py",
        "zero_runtime/same_host/work.py",
        "zero_runtime/same_host/meeting.py",
        "zero_runtime/world.py",
    },
    "hydra": {"orchestrator/compose/compose.py", "orchestrator/compose/overrides.py"},
    "omegaconf": {"orchestrator/compose/compose.py"},
    "submitit": {"orchestrator/launch/local_executor.py", "orchestrator/wings/slurm/executor.py"},
    "mlflow": {"orchestrator/tracking/store.py"},
    "optuna": {"orchestrator/wings/optuna/proposals.py"},
    "matplotlib": {"orchestrator/wings/page/charts/canvas.py"},
    "transformers": {
        "orchestrator/workloads/models.py",
        "orchestrator/wings/kinds/classes.py",
        "orchestrator/wings/pretrained/tokenizer.py",
        "zero_runtime/deepspeed/integrations/memory_usage.py",
        "zero_runtime/deepspeed/integrations/pretrained.py",
        "zero_runtime/deepspeed/integrations/transformers.py",
        "zero_runtime/parallel/sequence/attention.py",
    },
    "peft": {"orchestrator/wings/pretrained/adapters.py"},
}
# The rooms that each room of a package imports. A room is a folder or a top-level file; the files of PURE form one
# room, which every room may import.
ROOMS = {
    "orchestrator": {
        "wings": "",
        "exit_codes": "",
        "rounds": "",
        "text": "exit_codes",
        "config": "text wings",
        "machine": "config text",
        "workloads": "config wings",
        "compose": "config text wings",
        "records": "config machine workloads",
        "planning": "compose config machine records rounds text wings",
        "report": "config exit_codes records rounds text wings",
        "tracking": "config machine records report text",
        "launch": "config machine planning records report rounds text tracking wings",
        "shipped": "",
        "worker": "config launch machine records rounds text wings workloads",
        "commands": "compose config exit_codes launch machine planning records report text tracking wings",
        "cli": "commands compose config exit_codes machine records text wings",
        "start": "cli machine",
        "api": "commands config records report text",
        "orchestrator": "api",
        "wings.coded": "config",
        "wings.bundle": "machine records report text",
        "wings.divided": "config",
        "wings.faults": "wings worker",
        "wings.gpus": "text",
        "wings.energy": "rounds wings.gpus worker",
        "wings.lossy": "config records report",
        "wings.optuna": "commands compose config exit_codes launch planning records report text",
        "wings.page": "config records report rounds text wings",
        "wings.pairs": "config text workloads",
        "wings.kinds": "config wings.pairs workloads",
        "wings.scripts": "commands config exit_codes launch machine records text",
        "wings.slurm": "config launch machine records report tracking",
        "wings.torchrun": "commands config launch machine planning records report text tracking",
        "wings.transport": "report text",
        "wings.usage": "",
        "wings.validation": "config launch records report text worker workloads",
        "wings.words": "compose config text",
        "wings.pretrained": "config text wings.pairs wings.words workloads",
        "wings.engines": "commands compose config exit_codes machine planning report text wings wings.kinds wings.page "
        "wings.predict worker",
        "wings.foreign": "commands compose config exit_codes planning records report text wings wings.engines "
        "wings.pretrained wings.words",
        "wings.generate": "commands config exit_codes launch records report text wings.kinds wings.predict "
        "wings.pretrained worker workloads",
        "wings.predict": "commands compose config exit_codes launch machine planning records report rounds text wings "
        "wings.divided wings.kinds wings.profile wings.words worker workloads",
        "wings.profile": "config launch records report rounds text wings.page wings.predict worker",
    },
    "zero_runtime": {
        "cgroups": "",
        "wings": "",
        "dtypes": "",
        "process_identity": "",
        "own_device": "pure",
        "numa": "",
        "phase_clock": "pure",
        "gloo": "",
        "tensor_source": "pure",
        "shard_location": "pure",
        "step_report": "",
        "ledger": "",
        "watch": "process_identity pure",
        "world": "own_device pure watch wings",
        "issuing": "phase_clock pure watch",
        "collectives": "gloo issuing ledger phase_clock watch world",
        "agreement": "collectives pure",
        "deferred_values": "",
        "recorded_values": "deferred_values pure",
        "parameter_memory": "deferred_values pure",
        "slices": "pure tensor_source",
        "unit_planner": "deferred_values dtypes pure slices wings",
        "initial_values": "deferred_values pure",
        "guarded_parameter": "pure",
        "divisions": "collectives pure slices",
        "group_shard": "collectives",
        "codec": "",
        "unit_parameters": "codec collectives deferred_values dtypes group_shard guarded_parameter initial_values pure "
        "shard_location tensor_source unit_planner wings",
        "quantised": "codec collectives group_shard initial_values pure shard_location tensor_source "
        "unit_parameters unit_planner",
        "unit_gradients": "collectives dtypes pure unit_planner wings",
        "unit": "collectives guarded_parameter initial_values pure shard_location tensor_source "
        "unit_gradients unit_parameters unit_planner wings",
        "state_tier": "pure shard_location unit",
        "parameter_reads": "guarded_parameter pure unit",
        "users_backward": "unit",
        "skipped_modules": "parameter_reads pure unit",
        "graph_entries": "unit",
        "nested_tensors": "",
        "compiled_models": "pure world",
        "module_hooks": "compiled_models graph_entries nested_tensors parameter_reads pure skipped_modules unit "
        "users_backward",
        "step_backwards": "collectives module_hooks pure unit users_backward",
        "optim": "collectives dtypes pure slices state_tier unit wings",
        "generation": "collectives pure unit unit_parameters",
        "settings": "divisions initial_values pure tensor_source watch",
        "offload": "agreement cgroups collectives process_identity pure settings shard_location state_tier "
        "unit unit_planner",
        "activations": "offload pure unit_planner wings",
        "parallel": "activations collectives divisions pure slices unit_planner",
        "agreed_parameters": "pure",
        "build": "agreement collectives initial_values optim parameter_memory parameter_reads phase_clock "
        "pure settings shard_location slices state_tier tensor_source unit unit_planner wings world",
        "non_finite": "pure step_report unit",
        "whole_tensors": "collectives optim pure state_tier unit",
        "closed": "optim pure state_tier unit",
        "runtime": "agreed_parameters build closed divisions ledger module_hooks non_finite optim own_device "
        "phase_clock pure settings state_tier step_backwards step_report unit whole_tensors wings",
        "accounting": "pure runtime state_tier wings",
        "census": "accounting pure runtime",
        "dtype_audit": "dtypes ledger pure runtime state_tier unit",
        "predict": "activations collectives dtypes guarded_parameter module_hooks offload pure runtime "
        "settings unit_planner",
        "profile": "accounting census phase_clock predict runtime",
        "checkpoint": "agreement collectives optim process_identity pure runtime slices tensor_source unit wings",
        "deepspeed": "agreement checkpoint closed deferred_values dtypes initial_values optim own_device "
        "parallel predict profile pure recorded_values runtime step_report tensor_source unit unit_planner "
        "users_backward watch wings world",
        "import_finders": "",
        "zero_runtime": "import_finders",
        "same_host": "process_identity pure wings world",
    },
}
# Libraries that a floor may import in addition to the standard library and the floors below it.
# The files that are exempt: they integrate another library, and are imported only where a script names them.
INTEGRATIONS = {
    "zero_runtime/deepspeed/json_text.py": {"hjson"},
    "zero_runtime/deepspeed/integrations/memory_usage.py": {"transformers"},
    "zero_runtime/deepspeed/integrations/pretrained.py": {"transformers"},
    "zero_runtime/deepspeed/integrations/transformers.py": {"transformers"},
    "zero_runtime/parallel/sequence/attention.py": {"transformers"},
}
LIBRARIES = {"kernels": {"torch", "triton"}, "zero_runtime": {"torch", "numpy", "safetensors"}}


@cache
def imported(file: Path) -> set[str]:
    """Dotted names of everything that a file imports or accesses as `torch.distributed`, also inside functions.

    Imports of zero_runtime.kernels count as the floor `kernels`; a top-level `kernels` is Hugging Face's package.
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


def test_every_floor_has_files() -> None:
    assert {floor_of(file) for file in FILES} == set(FLOORS)
    assert len(FILES) > 30


@pytest.mark.parametrize("file", FILES, ids=str)
def test_imports_go_down_only(file: Path) -> None:
    above = set(FLOORS[FLOORS.index(floor_of(file)) + 1 :])
    assert {name for name in imported(file) if name.split(".")[0] in above} == set()


def module_of(file: Path) -> str:
    """The dotted name under which a file is imported."""
    return ".".join(file.with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(file): file for file in FILES}


def modules_imported(file: Path) -> set[str]:
    """Dotted names of our own modules that a file imports, including imports for type checkers only."""
    found = set()
    for name in imported(file):
        whole = name if name in MODULES else name.rpartition(".")[0]
        if whole in MODULES:
            found.add(whole)
    return found - {module_of(file)}


def room_of(module: str) -> str:
    """The key of ROOMS, or "pure"."""
    _, _, inside = module.partition(".")
    if inside.startswith("wings."):
        return ".".join(inside.split(".")[:2])  # each wing is a room
    if module.startswith("zero_runtime.") and inside in PURE:
        return "pure"
    return inside.split(".")[0] or module


@pytest.mark.parametrize("package", ROOMS)
def test_rooms_import_exactly_what_the_table_lists(package: str) -> None:
    arrows: dict[str, set[str]] = {}
    for module, file in MODULES.items():
        if module.split(".")[0] == package and room_of(module) != "pure":
            inside = {room_of(one) for one in modules_imported(file) if one.split(".")[0] == package}
            arrows.setdefault(room_of(module), set()).update(inside - {room_of(module), package})
    assert {room: set(allowed.split()) for room, allowed in ROOMS[package].items()} == arrows


def test_there_are_no_circular_imports() -> None:
    left = {module: modules_imported(file) - {"zero_runtime", "orchestrator"} for module, file in MODULES.items()}
    while free := [module for module, needs in left.items() if not needs & left.keys()]:
        for module in free:
            del left[module]
    assert left == {}


@pytest.mark.parametrize("library", IMPORTERS)
def test_each_library_is_imported_only_by_its_listed_files(library: str) -> None:
    found = {
        file.as_posix()
        for file in FILES
        if any(name == library or name.startswith(f"{library}.") for name in imported(file))
    }
    assert found, f"nobody imports {library}: does this test still read imports?"
    assert found <= IMPORTERS[library]


@pytest.mark.parametrize("floor", LIBRARIES)
def test_the_lower_floors_import_only_their_listed_libraries(floor: str) -> None:
    allowed = LIBRARIES[floor] | STANDARD | set(FLOORS[: FLOORS.index(floor) + 1])
    for file in FILES:
        if floor_of(file) == floor:
            own = allowed | INTEGRATIONS.get(file.as_posix(), set())
            assert {name for name in imported(file) if name.split(".")[0] not in own} == set(), file


@pytest.mark.parametrize("name", PURE)
def test_pure_files_import_the_standard_library_and_each_other(name: str) -> None:
    allowed = {f"zero_runtime.{pure}" for pure in PURE}
    for module in imported(Path("zero_runtime", *name.split(".")).with_suffix(".py")):
        assert module.split(".")[0] in STANDARD or module.rpartition(".")[0] in allowed, module


def modules_after(*imports: str) -> set[str]:
    """Top-level modules in a fresh interpreter after these imports, and all of its zero_runtime modules."""
    code = f"import sys, {', '.join(imports)}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    names = run.stdout.split()
    return {name.split(".")[0] for name in names} | {name for name in names if name.startswith("zero_runtime.")}


def test_pure_files_run_without_torch() -> None:
    loaded = modules_after("zero_runtime.kernels", *(f"zero_runtime.{name}" for name in PURE))
    assert {"zero_runtime", "zero_runtime.kernels"} <= loaded
    assert not loaded & {"torch", "numpy", "safetensors", "triton"}


def test_every_public_name_of_the_runtime_can_be_accessed() -> None:
    for name in zero_runtime.__all__:
        assert getattr(zero_runtime, name).__name__ == name
    with pytest.raises(AttributeError, match="'zero_runtime' has no attribute 'ZeroPlane'"):
        zero_runtime.ZeroPlane  # noqa: B018
