"""Checks the arithmetic of two tutorials on DeepSpeed against the closed forms, and says where it does not add up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from benchmarks.published_cases import FOLDER, GIB
from benchmarks.published_peak import peer_model
from zero_runtime.plan import ZeroPlan
from zero_runtime.predict.memory.paper_formulas import deepspeed_zero3_estimate
from zero_runtime.predict.memory.peer_deepspeed import deepspeed
from zero_runtime.predict.memory.peers import HALF

MASTER_AND_MOMENTS = 12  # bytes of an fp32 master weight and both moments
PARTS = ("parameters", "optimizer", "gradients", "activations", "buffers")


def tutorials() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((FOLDER / "tutorials.yaml").read_text(encoding="utf-8"))
    return loaded


def qwen_lines() -> Iterator[str]:
    """The section of the report about Qwen2.5-0.5B on four GPUs."""
    data = tutorials()["qwen"]
    model, world = peer_model(data["model"]), data["world"]
    yield f"Qwen2.5-0.5B has {model.numel:,} parameters (tied head); 4 GPUs, bf16. GiB per GPU, at the end of a step."
    yield ""
    yield "| | ZeRO-1 | ZeRO-2 |"
    yield "|---|---|---|"
    rows = data["rows"]
    yield _line("measured", [row["measured"] for row in rows])
    yield _line("the tutorial's total", [row["total"] for row in rows])
    for part in PARTS:
        yield _line(f"the tutorial: {part}", [row[part] for row in rows])
    states = [deepspeed(model, ZeroPlan.from_stage(row["zero"]), world).resting / GIB for row in rows]
    yield _line("closed form of the model states (K = 12)", states)
    left = [row["measured"] - state for row, state in zip(rows, states, strict=True)]
    yield _line("measured less the closed form", left)
    yield ""
    yield from _qwen_findings(data, model.numel, left)


def _qwen_findings(data: dict[str, Any], numel: int, left: list[float]) -> Iterator[str]:
    world, rows = data["world"], data["rows"]
    stated = data["stated_params"] * data["stated_bytes_per_param"] / 1e9
    optimizer = rows[0]["optimizer"] * world
    needed = data["stated_params"] * MASTER_AND_MOMENTS / 1e9
    gap = rows[0]["measured"] - rows[1]["measured"]
    grads = HALF * numel * (1 - 1 / world) / GIB
    bucket = HALF * min(numel, 500_000_000) / GIB
    yield (
        f"- Its table contradicts its text: {data['stated_bytes_per_param']}P is {stated:g} GB of states, of which the "
        f"optimizer's 12P are {needed:g} GB, {needed / world:g} GB a GPU; its table divides {optimizer:g} GB (8P, no "
        "master weights)."
    )
    yield (
        "- The number is `torch.cuda.memory_allocated()` in `on_step_end`: activations are freed by then, so neither "
        f"{rows[0]['activations']:g} nor {rows[1]['activations']:g} GB of it can be activations. The tutorial computed "
        "them as the residual."
    )
    yield (
        f"- ZeRO-2 measured {gap:.2f} GiB less than ZeRO-1. Sharding the gradients explains {grads:.2f} GiB; the other "
        f"{gap - grads:.2f} GiB must be buffers that ZeRO-1 keeps."
    )
    yield (
        f"- The closed form leaves {left[0]:.2f} and {left[1]:.2f} GiB. A reduce bucket is {bucket:.2f} GiB here; "
        "the remainder is unknown."
    )


def t0_lines() -> Iterator[str]:
    """The section of the report about T0_3B."""
    data = tutorials()["t0_3b"]
    numel, largest = data["params"], data["largest_layer"]

    def estimate(*, params: bool, optimizer: bool, built_sharded: bool) -> tuple[float, float]:
        value = deepspeed_zero3_estimate(
            numel, largest, 1, params_on_host=params, optimizer_on_host=optimizer, built_sharded=built_sharded
        )
        return value.host / GIB, value.gpu / GIB

    _, gpu = estimate(params=False, optimizer=False, built_sharded=True)
    host, small = estimate(params=False, optimizer=True, built_sharded=True)
    yield (
        f"- Without offload the estimator prints {gpu:.2f} (GiB, labelled GB), which is {gpu * GIB / 1e9:.1f} GB: "
        f"a GPU of {data['gpu_gb']} GB, as the guide says. It is 18P + 4L (L: the largest layer), not the paper's "
        f"16P, {16 * numel / GIB:.2f} GiB."
    )
    yield (
        f"- With the optimizer on the host it prints {host:.2f} | {small:.2f}, again in GiB: the host needs "
        f"{host * GIB / 1e9:.1f} GB, more than the guide's {data['host_gb']} GB."
    )
    yield (
        f"- The {small:.2f} GiB on the GPU are 4L + 2P/N, parameters alone. An {data['small_gpu_gb']} GB GPU has "
        f"{data['small_gpu_gb'] * 1e9 / GIB - small:.2f} GiB left for the reduce bucket (0.93 GiB with DeepSpeed's "
        "default), gathered parameters, the CUDA context and all activations; the guide mentions kernels and "
        "activations, but not the buckets."
    )


def _line(name: str, values: list[float]) -> str:
    return f"| {name} | " + " | ".join(f"{value:.2f}" for value in values) + " |"
