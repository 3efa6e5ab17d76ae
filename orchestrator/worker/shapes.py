"""A child process of the command line for work that needs the models, so that the command itself needs no torch.

Reads {"units": {key: configuration}, "activations": [{key: configuration}, ...]} as JSON from stdin; the configurations
in one dictionary of activations differ only in the micro-batch. Writes [key, answer] as one line of JSON to stdout as
each answer is ready. The answer is from `units_of` (the problem for a model that cannot be built, null for any other
failure) or from activations.py.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import Any, TextIO

from orchestrator.config.schema import RunConfig, from_dict
from orchestrator.worker.activations import answers
from orchestrator.worker.setup import build_deferred, unit_rules
from zero_runtime.offload.plan import offloaded_units
from zero_runtime.unit_planner import plan_units


def units_of(config: RunConfig) -> dict[str, Any]:
    """Shapes by unit in the order of registration, the bytes of optimizer state per element, the number of elements per
    block of that state, and the bytes of the model's buffers."""
    model, _ = build_deferred(config)
    rules = unit_rules(config)
    specs = plan_units(model, rules)
    optimizer = config.optimizer.rule
    return {
        "units": [
            {
                "name": spec.name,
                "shapes": [[name, list(param.shape)] for name, param in spec.params],
                "trainable": spec.trainable,
                "matrices": spec.matrices,
                "is_root": model in spec.modules,
                "precision": asdict(spec.precision),
                "offloaded": offloaded,
            }
            for spec, offloaded in zip(specs, offloaded_units(specs, config.offload.ratio), strict=True)
        ],
        "state_bytes": optimizer.state_bytes,
        "block_numel": optimizer.block_numel,
        "buffer_bytes": sum(buffer.nbytes for buffer in model.buffers()),
    }


def _answer(config: RunConfig) -> dict[str, Any] | None:
    try:
        return units_of(config)
    except ValueError as error:  # the user's mistake, as every builder promises; a job would report the same
        return {"problem": "; ".join(str(error).splitlines())}
    except Exception as error:  # the other answers are still needed, and the run itself will report the error
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return None


def _tell(out: TextIO, key: str, answer: Any) -> None:
    out.write(json.dumps([key, answer]) + "\n")
    out.flush()


def main() -> None:
    # Libraries, C code included, may print to stdout. From here on their output goes to stderr instead.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    asked = json.load(sys.stdin)
    for key, config in asked["units"].items():
        _tell(out, key, _answer(from_dict(config)))
    for family in asked["activations"]:
        for key, answer in answers([from_dict(one) for one in family.values()]):
            _tell(out, key, answer)


if __name__ == "__main__":
    main()
