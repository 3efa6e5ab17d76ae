"""Work that needs the models, in a child process of the command line, so that the command itself needs no torch.

Gets {"units": {key: configuration}, "activations": [{key: configuration}, ...]}; the configurations in one dictionary
of activations differ only in the micro-batch. Writes [key, answer] as one line of JSON to stdout as
each answer is ready. The answer is from `units_of` or from activations.py, the problem of a model that cannot be built,
or what else failed, which is "passing".

[Note: forked counting]
Families of activations share nothing but the model, so that forks of this process count them, as many as there are
cores and at most MOST. The model is built before, for all of them. What was left when a process died is counted again,
one family at a time.

[Note: threads after a fork]
The first call of torch.set_num_threads makes a pool of threads, which a fork cannot use: in a fork, the next such call
replaces the pool. The threads of autograd's devices, one for each, all make that call when they start, and two at once
end the process ("Invalid thread pool!"). So each fork makes it before it has any other thread, and this process, which
computes nothing, never makes it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from orchestrator.config.schema import RunConfig, from_dict
from orchestrator.machine.processes import die_with_parent
from orchestrator.wings.kinds.classes import experts_in
from orchestrator.wings.predict.activations import answers, built, shorten_once
from orchestrator.wings.predict.sliced import messages_of
from orchestrator.worker.setup import unit_rules
from zero_runtime.errors import brief
from zero_runtime.offload_plan import offloaded_units
from zero_runtime.unit_planner import block_modules, plan_units

MOST = 4  # processes that count; each takes some hundred MiB
Family = Mapping[str, Any]  # configurations by key that differ only in the micro-batch


def units_of(config: RunConfig) -> dict[str, Any]:
    """Shapes by unit in the order of registration, the names of the parameters of each repeated block, the bytes of
    optimizer state per element, the number of elements per block of that state, the bytes of the model's buffers, the
    messages of tensor parallelism, and the full shapes of what it divides.

    The shapes are those of a rank's slices; the number of elements (`numel`) is that of the full parameters.
    """
    model = built(config)
    specs = plan_units(model, unit_rules(config, model))
    optimizer = config.optimizer.rule
    return {
        "units": [
            {
                "name": spec.name,
                "shapes": [[name, list(shape)] for name, shape in spec.shapes],
                "numel": spec.numel,
                "trainable": spec.trainable,
                "matrices": spec.matrices,
                "is_root": model in spec.modules,
                "precision": asdict(spec.precision),
                "offloaded": offloaded,
            }
            for spec, offloaded in zip(specs, offloaded_units(specs, config.offload.ratio), strict=True)
        ],
        "blocks": _blocks_of(model),
        "state_bytes": optimizer.state_bytes,
        "block_numel": optimizer.block_numel,
        "buffer_bytes": sum(buffer.nbytes for buffer in model.buffers()),
        "experts": experts_in(model, config.model.model_type, config.model.config),
        "attention": getattr(getattr(model, "config", None), "_attn_implementation", "") or "",
        "tensor": messages_of(config, model).plain(),
        "full_shapes": {name: split.shape for spec in specs for name, split in spec.slices.splits.items()},
    }


def _blocks_of(model: nn.Module) -> list[list[str]]:
    """The parameters of each repeated block by name, frozen ones too. A shared one is the first block's."""
    names = {id(param): name for name, param in model.named_parameters()}
    return [
        [names.pop(id(param)) for param in block.parameters() if id(param) in names] for block in block_modules(model)
    ]


def _answer(config: RunConfig) -> dict[str, Any]:
    try:
        return units_of(config)
    except ValueError as error:  # the user's mistake, as every builder promises; a job would report the same
        return {"problem": "; ".join(str(error).splitlines())}
    except Exception as error:  # the other answers are still needed; it may be this machine's memory, so it passes
        return {"unknown": brief(error), "passing": True}


def _begin_fork(parent: int) -> None:
    die_with_parent(parent)
    torch.set_num_threads(1)  # fake tensors need no more: see [Note: threads after a fork]


def _answered(family: Family) -> list[str]:
    """The lines of a family's answers."""
    return [json.dumps(told) for told in answers([from_dict(one) for one in family.values()])]


def answer_families(families: Sequence[Family], tell: Callable[[str], object], processes: int) -> None:
    """Tells the lines of each family, which forks of this process count: see [Note: forked counting]."""
    if not families:
        return
    shorten_once(from_dict(next(iter(families[0].values()))))  # before it is forked, so that no fork builds it again
    for family in _in_forks(families, tell, min(processes, len(families))):
        for key in family if _in_forks([family], tell, 1) else ():
            tell(json.dumps([key, {"unknown": "the process that counted them died twice", "passing": True}]))


def _in_forks(families: Sequence[Family], tell: Callable[[str], object], processes: int) -> list[Family]:
    """Tells the lines of the families. Returns those that were left when a process died."""
    left, context = [], multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, context, _begin_fork, (os.getpid(),)) as pool:
        asked = {pool.submit(_answered, family): family for family in families}
        for future in as_completed(asked):
            if isinstance(future.exception(), BrokenProcessPool):
                left.append(asked[future])
                continue
            for line in future.result():
                tell(line)
    return left


def _count() -> int:
    """How many processes count: as many as this one may use cores, and at most MOST."""
    return min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1, MOST)


def main(asked: Mapping[str, Any]) -> None:
    """Answers on stdout what is asked."""
    # Libraries, C code included, may print to stdout. From here on their output goes to stderr instead.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def tell(line: str) -> None:
        print(line, file=out, flush=True)

    for key, config in asked["units"].items():
        tell(json.dumps([key, _answer(from_dict(config))]))
    answer_families(asked["activations"], tell, _count())
