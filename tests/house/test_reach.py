"""The trunk: what a run and a sweep import without a wing. Its size only goes down.

Imports inside functions count, and those for type checkers too. What a table names by a string is not followed: that
is how the trunk reaches a wing.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterable
from functools import cache

from orchestrator import wings
from orchestrator.config.cluster import ClusterKind
from orchestrator.launch.cluster import SweepCluster, cluster
from tests.house.test_imports import MODULES, ROOT, modules_imported

# Modules that the processes of a run and of a sweep start with, the command line first.
STARTS = (
    "run",
    "orchestrator.start",
    "orchestrator.launch.controller",
    "orchestrator.launch.rank",
    "orchestrator.tracking.process",
    "orchestrator.worker.train",
)
# The wings, as prefixes of module names.
WINGS = (
    "orchestrator.wings.",
    "zero_runtime.activations.modes",
    "zero_runtime.activations.offload",
    "zero_runtime.activations.on_host",
    *(
        f"zero_runtime.checkpoint.{name}"  # all but the headers of files, which a configuration reads
        for name in (
            *("background", "compatibility", "digest", "hugging_face", "layout", "load", "of_run", "retention", "rng"),
            *("save", "snapshot", "tensor_file"),
        )
    ),
    "zero_runtime.deepspeed",
    "zero_runtime.generation",
    "zero_runtime.offload.",
    "zero_runtime.optim.lamb",
    "zero_runtime.optim.muon",
    "zero_runtime.optim.onebit",
    "zero_runtime.optim.torch_rule",
    "zero_runtime.parallel",
    "zero_runtime.predict",
    "zero_runtime.profile",
    "zero_runtime.quantised",
    "zero_runtime.recorded_values",
    "zero_runtime.same_host",
)
# What a parameter passes between the plan and the step, in this order; a file may have left the list, none joins it
# without another leaving.
WAY = (
    *("plan", "precision", "flat_layout", "wire", "unit_planner", "initial_values", "tensor_source", "settings"),
    *("build", "unit", "unit_parameters", "unit_gradients", "guarded_parameter", "module_hooks", "backward_tracker"),
    *("schedule", "collectives", "issuing", "gloo", "ledger", "optim.sharded", "optim.grad_norm", "runtime"),
)
# The most lines of code: without blank lines, comments and docstrings. A change may lower a number, and raises none; a
# new wing raises them once, by its own budget and by the seams that decisions.md names. Raised once for corrections of
# wrong answers (decisions 56 to 58, all-linear, penalties on weights), and once for what DeepSpeed's users look for
# (decisions 59 and 60, what the drop-in prints, checkpoints of nodes, TFLOP/s, the bundle).
TRUNK, RUNTIME_TRUNK, ONE_PARAMETER, PRODUCT = 20_548, 7_308, 3_151, 53_878
ENGINES, SAME_HOST = 2_433, 1_258  # of them the wings of other engines, and of ranks that read each other


@cache
def lines_of_code(module: str) -> int:
    text = (ROOT / MODULES[module]).read_text()
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            lines.update(range(token.start[0], token.end[0] + 1) if token.type != tokenize.ENDMARKER else ())
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node, clean=False
        ):
            lines.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def code_of(modules: Iterable[str]) -> int:
    return sum(map(lines_of_code, modules))


@cache
def trunk() -> dict[str, str]:
    """Every module that STARTS import, each with the one that imported it first."""
    reached = dict.fromkeys(STARTS, "a process")
    waiting = list(STARTS)
    while waiting:
        module = waiting.pop(0)
        package = module.rpartition(".")[0]
        for needed in sorted(modules_imported(MODULES[module]) | ({package} & MODULES.keys())):
            if needed not in reached:
                reached[needed] = module
                waiting.append(needed)
    return reached


def test_the_trunk_imports_no_wing() -> None:
    in_wing = {module: by for module, by in trunk().items() if module.startswith(WINGS)}
    assert in_wing == {}, "a wing is named in a table and imported when it is used"


def test_every_name_in_the_table_of_wings_is_there() -> None:
    parts = [part for name, value in vars(wings).items() if name.isupper() for part in _texts(value)]
    places = [part.partition(":") for part in parts if part.startswith("orchestrator.")]
    assert places
    for module, _, name in places:
        assert module in MODULES, module
        defined = {getattr(node, "name", "") for node in ast.parse((ROOT / MODULES[module]).read_text()).body}
        assert not name or name in defined, (module, name)


def _texts(value: object) -> Iterable[str]:
    if isinstance(value, str):
        return [value]
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else ()
    return [text for one in inside for text in _texts(one)]


def test_every_cluster_kind_has_a_cluster() -> None:
    for kind in ClusterKind:
        assert isinstance(cluster(kind), SweepCluster)


def test_the_sizes_only_go_down() -> None:
    runtime = [module for module in trunk() if module.startswith("zero_runtime")]
    sizes = {
        "trunk": code_of(trunk()),
        "zero_runtime in it": code_of(runtime),
        "the way of one parameter": code_of(f"zero_runtime.{name}" for name in WAY),
        "product": code_of(MODULES),
        "wing of engines": code_of(module for module in MODULES if module.startswith("orchestrator.wings.engines")),
        "wing same_host": code_of(module for module in MODULES if module.startswith("zero_runtime.same_host")),
    }
    budgets = dict(zip(sizes, (TRUNK, RUNTIME_TRUNK, ONE_PARAMETER, PRODUCT, ENGINES, SAME_HOST), strict=True))
    assert all(sizes[name] <= most for name, most in budgets.items()), (sizes, budgets)
