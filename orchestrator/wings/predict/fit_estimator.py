"""What `zlab fit --estimator P,L` prints: the tables of DeepSpeed's two estimators, and what they leave out."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from decimal import Decimal
from typing import Any, NamedTuple

from orchestrator.config.strict import Refusal
from orchestrator.report.screen import Screen, make_console
from orchestrator.report.summary import Row
from orchestrator.text.paths import program
from orchestrator.text.units import size
from zero_runtime.predict.memory.device_overhead import DeviceOverhead
from zero_runtime.predict.memory.paper_formulas import (
    EstimatedBytes,
    deepspeed_zero2_estimate,
    deepspeed_zero3_estimate,
)
from zero_runtime.predict.memory.peer_deepspeed import DeepSpeedSettings
from zero_runtime.predict.memory.peers import HALF

RANKS, NODES = "resources.ranks", "resources.nodes"
FLAG = "--estimator"
EXAMPLE = f"{FLAG} 2783959040,65798144"
MULTIPLES = {"": 1, "M": 10**6, "B": 10**9}
_NUMBER = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)([MB]?)")
_WORD = re.compile(rf"({re.escape(RANKS)}|{re.escape(NODES)})=([1-9][0-9]{{0,8}})")
GIB, M = 1 << 30, 10**6


class EstimatorInput(NamedTuple):
    """What the estimators are asked for. numel: parameters; largest_layer: those of the module with the most."""

    numel: int
    largest_layer: int
    gpus_per_node: int
    nodes: int

    @property
    def gpus(self) -> int:
        return self.gpus_per_node * self.nodes


class Estimate(NamedTuple):
    """A line of a table. zero_init: None where the estimator does not have it."""

    params_on_host: bool
    optimizer_on_host: bool
    zero_init: bool | None
    value: EstimatedBytes

    @property
    def options(self) -> str:
        """The options in DeepSpeed's words, which pads `cpu` to four characters."""
        if self.zero_init is None:
            return f"offload_optimizer={_device(self.optimizer_on_host)}".rstrip()
        offloads = f"offload_param={_device(self.params_on_host)}, offload_optimizer={_device(self.optimizer_on_host)}"
        return f"{offloads}, zero_init={int(self.zero_init)}"

    def line(self) -> str:
        return f" {self.value.host / GIB:7.2f}GB | {self.value.gpu / GIB:6.2f}GB | {self.options}"


def main(text: str, words: Sequence[str], *, as_json: bool) -> int:
    """Prints both tables. Returns 0. Refusal if the numbers or the words are wrong."""
    asked = _asked(text, words)
    tables = {"ZeRO-2": list(zero2(asked)), "ZeRO-3": list(zero3(asked))}
    if as_json:
        print(json.dumps({name: [_plain(one) for one in lines] for name, lines in tables.items()}))
        return 0
    screen = Screen(make_console())
    screen.rows([Row("engine", "DeepSpeed 0.19.6, by the formulas of its two estimators; nothing of it was run")])
    for name, lines in tables.items():
        screen.console.print()
        screen.say(name, "bold")
        for line in (*head(asked, with_layer=name == "ZeRO-3"), *(one.line() for one in lines)):
            screen.say(line)
    screen.console.print()
    screen.rows(_left_out(asked))
    machine = [word for word in words if _WORD.fullmatch(word)]
    line = shlex.join(["fit", "model=NAME", "hardware=NAME", *machine, "--as", "deepspeed"])
    screen.closing([Row("counted", f"{program()} {line}")])
    return 0


def zero2(asked: EstimatorInput) -> Iterator[Estimate]:
    """The lines of `estimate_zero2_model_states_mem_needs_all_cold`."""
    for on_host in (True, False):
        value = deepspeed_zero2_estimate(asked.numel, asked.gpus_per_node, asked.nodes, optimizer_on_host=on_host)
        yield Estimate(False, on_host, None, value)


def zero3(asked: EstimatorInput) -> Iterator[Estimate]:
    """The lines of `estimate_zero3_model_states_mem_needs_all_cold`."""
    for optimizer, params in ((True, True), (True, False), (False, False)):
        for zero_init in (True, False):
            value = deepspeed_zero3_estimate(
                asked.numel,
                asked.largest_layer,
                asked.gpus_per_node,
                asked.nodes,
                params_on_host=params,
                optimizer_on_host=optimizer,
                built_sharded=zero_init,
            )
            yield Estimate(params, optimizer, zero_init, value)


def head(asked: EstimatorInput, *, with_layer: bool) -> list[str]:
    """The lines above a table. Millions are truncated, as DeepSpeed does."""
    nodes, gpus = f"node{'s' * (asked.nodes > 1)}", f"GPU{'s' * (asked.gpus_per_node > 1)}"
    layer = f", {asked.largest_layer // M}M largest layer params" if with_layer else ""
    return [
        "Estimated memory needed for params, optim states and gradients for a:",
        f"HW: Setup with {asked.nodes} {nodes}, {asked.gpus_per_node} {gpus} per node.",
        f"SW: Model with {asked.numel // M}M total params{layer}.",
        "  per CPU  |  per GPU |   Options",
    ]


def _left_out(asked: EstimatorInput) -> list[Row]:
    """What exists in a step and is in none of the lines, with the bytes that the numbers determine."""
    defaults = DeepSpeedSettings()
    live = HALF * min(asked.numel, defaults.max_live_parameters + defaults.prefetch_bucket_size)
    libraries = DeviceOverhead.on_cuda(asked.gpus, asked.gpus)
    return [
        Row("units", "their GB are GiB, 2^30 bytes; per CPU is the host memory of a node, with a factor of 1.5"),
        Row("left out", "of each GPU: activations and the model's buffers, which P and L do not determine"),
        Row("", f"up to {size(live)} of gathered parameters in ZeRO-3, where the table has 2L"),
        Row("", f"up to {size(HALF * defaults.reduce_bucket_size)} for each bucket of the reduction, one or two"),
        Row("", f"{size(libraries.least)} to {size(libraries.most)} for CUDA, cuBLAS and NCCL"),
    ]


def _device(on_host: bool) -> str:
    return "cpu " if on_host else "none"


def _plain(one: Estimate) -> dict[str, Any]:
    nbytes = {f"{name}_bytes": value for name, value in asdict(one.value).items()}
    options = {"params_on_host": one.params_on_host, "optimizer_on_host": one.optimizer_on_host}
    return {**options, "zero_init": one.zero_init, **nbytes}


def _asked(text: str, words: Sequence[str]) -> EstimatorInput:
    numel, largest_layer = ([_numel(part) for part in text.split(",")] + [0, 0])[:2]
    problems = []
    if text.count(",") != 1 or not 0 < largest_layer <= numel:
        expected = "expected the numbers of parameters of the model and of its largest layer"
        problems.append(f"{FLAG}: {expected}, found '{text}'      fix: {EXAMPLE}")
    wrong = [word for word in words if not _WORD.fullmatch(word)]
    problems += [f"{FLAG} knows {RANKS}=N and {NODES}=N, found '{word}'      fix: leave it out" for word in wrong]
    given = {match[1]: int(match[2]) for word in words if (match := _WORD.fullmatch(word))}
    nodes = given.get(NODES, 1)
    ranks = given.get(RANKS, nodes)
    if ranks % nodes:
        problems.append(f"{RANKS} must be a multiple of {NODES}={nodes}, found {ranks}      fix: {RANKS}={nodes}")
    if problems:
        raise Refusal(problems)
    return EstimatorInput(numel, largest_layer, ranks // nodes, nodes)


def _numel(text: str) -> int:
    """A number such as 2783959040, 2783M or 6.74B; 0 if it is none."""
    match = _NUMBER.fullmatch(text)
    return 0 if match is None else int(Decimal(match[1]) * MULTIPLES[match[2]])
