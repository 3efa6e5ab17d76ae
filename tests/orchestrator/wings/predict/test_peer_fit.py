"""Rows of `zlab fit --as ENGINE`: the engine's terms with the model's activations, and the largest micro-batch."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
from points import config_of_line

from orchestrator.config.schema import Device, to_dict
from orchestrator.planning.point import Point
from orchestrator.wings.predict import memory_cache, shapes
from orchestrator.wings.predict.fit_peers import as_engine
from orchestrator.wings.predict.peer_fit import PeerFit, peer_fit, peer_model, rules_for
from orchestrator.wings.predict.peer_limits import limits
from orchestrator.wings.predict.step import ConfigMemory, rules_of
from orchestrator.wings.predict.target import Target
from zero_runtime.optim.configs import AdamWConfig
from zero_runtime.predict.memory.activation_count import LinearTrace, Trace
from zero_runtime.predict.memory.device_overhead import NO_OVERHEAD, DeviceOverhead
from zero_runtime.predict.memory.peers import Moment
from zero_runtime.predict.memory.step_memory import StepMemory, StepPeaks

NUMEL, BLOCKS, RANKS, HIGH = 1000, 3, 4, 64
TOTAL = NUMEL * (BLOCKS + 1)
ACTIVATION_BYTES, BUFFER_BYTES, SEQ = 500, 24, 8
INPUT_BYTES = 16 * SEQ  # ids and labels of a sequence
# Rules with which most bytes exist in forward and backward, whatever the micro-batch: a bucket holds the whole model.
DEEPSPEED, IN_COMPUTE = ("deepspeed", "precision=fp32 zero=stage1"), (4 + 12 // RANKS + 4) * TOTAL
SHAPES: dict[str, Any] = {
    "units": [{"name": "embed_tokens", "trainable": True, "shapes": [["weight", [10, NUMEL // 10]]]}]
    + [
        {
            "name": f"model.layers.{block}",
            "trainable": True,
            "shapes": [[f"{block}.a", [600]], [f"{block}.b", [40, 10]]],
        }
        for block in range(BLOCKS)
    ],
    "blocks": [[f"{block}.a", f"{block}.b"] for block in range(BLOCKS)],
}


def row(
    engine: str,
    words: str,
    limit: int = 10**9,
    overhead: DeviceOverhead = NO_OVERHEAD,
    *,
    given: int = 0,
    ranks_per_node: int = 1,
    host_bytes: int | None = None,
    on_gpus: bool = False,
) -> PeerFit | None:
    point = asked(engine, f"batch.seq={SEQ} batch.micro={given or 1} {words}", on_gpus=on_gpus)
    if given:
        point = replace(point, overrides=(f"batch.micro={given}",))
    trace = Trace()
    trace.went(trace.came(ACTIVATION_BYTES, in_block=True))
    linear = LinearTrace(trace, [ACTIVATION_BYTES], 1, HIGH)
    tokens = SEQ * (point.config.batch.accumulation or 1)
    part = StepMemory(
        linear, StepPeaks(1, HIGH, (), 0), (8 * tokens, 8 * tokens), BUFFER_BYTES
    )  # our peaks are not used by the rules
    memory = ConfigMemory(point.config, [], rules_of(point.config, {"state_bytes": 8.0}), (part,))
    target = Target(point.config.resources.device, limit, 1, host_bytes, ranks_per_node)
    return peer_fit(point, memory, SHAPES, target, overhead)


def asked(engine: str, words: str, *, on_gpus: bool = False) -> Point:
    config = config_of_line(f"precision=bf16 resources.device=cpu resources.ranks={RANKS} {words}")
    if on_gpus:
        config = replace(config, resources=replace(config.resources, device=Device.cuda))
    return as_engine(engine, Point("a", config))


def test_a_block_has_the_parameters_inside_its_module_frozen_ones_too() -> None:
    model = peer_model(SHAPES, AdamWConfig())
    assert [[one.numel for one in block] for block in model.blocks] == [[600, 400]] * BLOCKS
    assert [one.numel for one in model.others] == [NUMEL]
    assert [one.decays for one in model.blocks[0]] == [False, True]  # of one dimension, and of two
    assert model.numel == TOTAL
    adapters = shapes.units_of(config_of_line("model=llama_tiny adapter=lora resources.device=cpu resources.ranks=2"))
    model = peer_model(adapters, AdamWConfig())
    assert {sum(not one.trained for one in block) for block in model.blocks} == {9}  # 7 matrices and 2 norms
    assert [one.shape for one in model.others if one.trained] == []
    assert len(model.others) == 3  # embedding, head and last norm


def test_the_peak_has_the_activations_the_inputs_and_the_buffers_beside_the_engines_terms() -> None:
    found = row(*DEEPSPEED)
    assert found is not None
    assert found.resting_bytes == (4 + (12 + 4) / RANKS) * TOTAL
    assert found.peak.total == IN_COMPUTE + HIGH * (ACTIVATION_BYTES + INPUT_BYTES) + BUFFER_BYTES
    assert (found.micro, found.capped) == (HIGH, True)


@pytest.mark.parametrize("micro", [0, 1, 7, HIGH - 1])
def test_the_largest_micro_batch_is_the_last_one_whose_peak_fits(micro: int) -> None:
    each = ACTIVATION_BYTES + INPUT_BYTES
    limit = IN_COMPUTE + BUFFER_BYTES + (micro + 1) * each - 1
    found = row(*DEEPSPEED, limit + 100, DeviceOverhead(0, 50, 100))
    assert found is not None
    assert (found.micro, found.capped) == (micro, False)
    assert found.activations == max(micro, 1) * ACTIVATION_BYTES


@pytest.mark.parametrize("given", [1, 7, HIGH])
@pytest.mark.parametrize("lacks", [0, 1])
def test_a_given_micro_batch_fits_if_its_peak_does(given: int, lacks: int) -> None:
    peak = IN_COMPUTE + BUFFER_BYTES + given * (ACTIVATION_BYTES + INPUT_BYTES)
    found = row(*DEEPSPEED, peak - lacks, given=given)
    assert found is not None
    assert (found.counted, found.peak.total) == (given, peak)
    assert (found.micro, found.verdict) == ((0, "no") if lacks else (given, "yes"))


@pytest.mark.parametrize(("host", "fits"), [(0, False), (10**9, True)])
def test_what_the_ranks_of_a_node_offload_must_fit_its_host(host: int, fits: bool) -> None:
    words = "zero=stage1 offload=optimizer_cpu"
    found = row("deepspeed", words, given=1, ranks_per_node=RANKS, host_bytes=host, on_gpus=True)
    assert found is not None
    # 12 bytes of masters and moments, 4 of fp32 gradients, 2 of a copy of the parameters; and one gradient's buffer
    assert found.host_bytes == 18 * TOTAL // RANKS + 2 * NUMEL
    assert found.host_of_node == RANKS * found.host_bytes
    assert bool(found.micro) is fits


PURE = "precision=bf16_pure optimizer.beta2=0.95 optimizer.state_dtype=bf16"
NONE = "offload=none loss=full"
OWN_OPTIMIZERS = [("plain", "adamw8bit"), ("ddp", "lion"), ("ddp", "muon")]
OWN_WORDS = [
    ("precision.keep_dtype=[a]", "casts all parameters, found precision.keep_dtype"),
    ("precision.weights=int4 adapter=lora", "stores no codes, found precision.weights=int4"),
    ("zero.unit_numel=100000", "makes its own units, found zero.unit_numel"),
    ("zero.gather_dtype=int8", "sends exact messages, found quantised ones"),
    ("measure=eval", "is measured for a number of steps, found measure=eval"),
]
ROWS = 3 * 100 + BLOCKS * (150 + 10 * 10)  # elements of rank 0, which has whole rows: 3 of the 10 of the embedding
HALF_ROWS = 5 * 100 + BLOCKS * (300 + 20 * 10)  # of two ranks


@pytest.mark.parametrize(
    ("engine", "words", "problem"),
    [
        ("ddp", "zero=stage1", "shard nothing, found zero=stage1"),
        ("fsdp2", "zero=stage0", "shard at these settings, found zero=stage0"),
        ("deepspeed", "zero=stage0 offload=optimizer_cpu", "shard at these settings, found zero=stage0"),
        ("deepspeed", "zero=stage1 recompute=by_operation", ""),
        ("ddp", "zero=stage0 recompute=by_operation", ""),
        *(
            (engine, f"zero=stage{stage} loss=tiled", "")
            for engine, stage in (("fsdp2", 3), ("deepspeed", 1), ("ddp", 0))
        ),
        ("deepspeed", "zero=stage2 parallel=tp2", "divide no layers, found parallel.tp=2"),
        ("ddp", "zero=stage0 parallel=tp2", "divide no layers, found parallel.tp=2"),
        ("fsdp2", "zero=stage3 parallel=tp2", ""),
        ("fsdp2", "zero=stage3 parallel.sp=2", "divide no sequences, found parallel.sp=2"),
        ("deepspeed", f"zero=stage1 {PURE}", ""),
        ("fsdp2", f"zero=stage3 {PURE}", ""),
        *((engine, f"zero=stage0 {PURE}", "") for engine in ("ddp", "plain")),
        ("plain", "zero=stage0 precision=bf16_pure", "keep fp32 masters, found precision.master=bf16"),
        *((engine, f"zero=stage0 optimizer={name}", "has torch.optim's optimizers") for engine, name in OWN_OPTIMIZERS),
        ("ddp", "zero=stage0 recompute.offload=cpu", "keep activations, found recompute.offload=cpu"),
        ("ddp", "zero=stage0 precision.reduce=bf16", "reduce in fp32, found precision.reduce=bf16"),
        ("fsdp2", "zero=stage3 zero.prefetch=2", "do not read zero.prefetch, found 2"),
        (
            "deepspeed",
            "zero=stage2 batch.accumulation=2 zero.reduce_at_boundary=true",
            "do not read zero.reduce_at_boundary, found True",
        ),
        ("deepspeed", "zero=stage3 zero.shard_ranks=2", "shards over all ranks, found zero.shard_ranks"),
        *((engine, f"zero=stage3 {words}", told) for engine in ("fsdp2", "deepspeed") for words, told in OWN_WORDS),
        ("deepspeed", "zero=stage1 precision=bf16_pure", "keep fp32 masters, found precision.master=bf16"),
        (
            "deepspeed",
            "zero=stage1 optimizer.state_dtype=bf16 optimizer.beta2=0.95",
            "keep fp32 moments, found optimizer.state_dtype=bf16",
        ),
    ],
)
def test_settings_that_the_rules_do_not_know_are_refused_by_name(engine: str, words: str, problem: str) -> None:
    problems = [str(one) for one in limits(asked(engine, f"{NONE} {words}").config)]
    assert (row(engine, f"{NONE} {words}") is None) is bool(problem)
    assert problem in problems[0] if problem else not problems


# Words that change each setting of these groups, but for those that take no bytes of the device or the host by
# themselves: rates, constants, scales, what belongs to an optimizer or an offload that is refused, and the dtype of the
# computation, which is the parameters' in other engines.
WORDS = {
    "zero": "stage=2 prefetch=2 shard_ranks=2 outer_sharding=optim reduce_at_boundary=true unit_numel=9999 "
    "gather_dtype=int8 reduce_dtype=int8 error_feedback=true",
    "precision": "param=fp32 reduce=bf16 accumulate=bf16 master=bf16 weights=int4 keep_dtype=[*norm*]",
    "offload": "params=cpu optimizer=cpu ratio=0.5",
    "optimizer": "kind=lion state_dtype=bf16",
    "adapter": "kind=lora rank=4 targets=[q_proj]",
    "recompute": "kind=by_operation every=3 offload=cpu products=2",
    "loss": "kind=tiled tile=64",
    "parallel": "tp=2 sp=2",
}
NO_BYTES = {
    "precision": {"compute", "tf32"},
    "offload": {"folder", "block_mib", "requests", "ahead", "verify"},
    "adapter": {"alpha"},
    "parallel": {"patterns"},
}
NEEDED = {  # what a setting means something with
    "offload.ratio": "offload=optimizer_cpu",
    "precision.weights": "adapter=lora",
    "precision.accumulate": "batch.accumulation=2",
    "zero.reduce_at_boundary": "batch.accumulation=2",
    "zero.outer_sharding": "zero.shard_ranks=2",
    "zero.error_feedback": "zero.reduce_dtype=int8",
    "offload.params": "zero=stage3",
    "recompute.every": "recompute=every_nth",
    "recompute.products": "recompute=by_operation",
    "loss.tile": "loss=tiled",
    "adapter.rank": "adapter=lora",
    "adapter.targets": "adapter=lora",
}
# DeepSpeed's rules have its default, which sends gradients in their dtype; one process sends none.
SENDS_ITS_OWN = ("deepspeed", "plain")


@functools.cache
def counted_by(engine: str, line: str) -> object:
    """Bytes of a line by the engine's rules and the activations; None if it is refused."""
    config = asked(engine, line, on_gpus=True).config
    if limits(config):
        return None
    return rules_for(config, shapes.units_of(config)), memory_cache.activations_key(config)


@pytest.mark.parametrize(
    ("engine", "stage"),
    [
        ("fsdp2", 3),
        *(
            pytest.param(engine, stage, marks=pytest.mark.full)
            for engine, stage in (("deepspeed", 3), ("ddp", 0), ("plain", 0))
        ),
    ],
)
def test_every_setting_is_counted_or_refused(engine: str, stage: int) -> None:
    base = f"model=llama_tiny precision=bf16 resources.device=cpu resources.ranks=4 zero=stage{stage}"
    ignored = []
    for group, words in WORDS.items():
        for word in words.split():
            name = f"{group}.{word.partition('=')[0]}"
            if (group == "zero" and stage < 3) or (name == "precision.reduce" and engine in SENDS_ITS_OWN):
                continue
            before = f"{base} {NEEDED.get(name, '')}"
            given = f"{base} optimizer=lion" if name == "optimizer.kind" else f"{before} {group}.{word}"
            found = counted_by(engine, given)
            ignored += [given] if found is not None and found == counted_by(engine, before) else []
    assert not ignored, "\n".join(ignored)


def test_the_settings_above_are_all_of_their_groups() -> None:
    every = to_dict(config_of_line("model=llama_tiny resources.device=cpu resources.ranks=2 precision=fp16"))
    told = {
        group: {word.partition("=")[0] for word in words.split()} | NO_BYTES.get(group, set())
        for group, words in WORDS.items()
    }
    left = {group: set(every[group]) - told[group] for group in WORDS}
    assert all("scale" in key or "hysteresis" in key for key in left.pop("precision"))
    assert left.pop("optimizer") >= {"lr", "clip_norm"}  # constants of the optimizers that are refused among them
    assert not any(left.values()), left


@pytest.mark.parametrize(
    ("engine", "stage", "words", "each"),
    [
        # A copy of the 16-bit weights is the master; moments and gradients are in 16 bits.
        ("deepspeed", 1, PURE, 2 + (2 + 4 + 2) / RANKS),
        ("deepspeed", 2, PURE, 2 + (2 + 4 + 2) / RANKS),
        ("fsdp2", 3, PURE, (2 + 4 + 2) * ROWS / TOTAL),
        # As from_pretrained(dtype=bfloat16) and torch's AdamW: no master, and nothing in fp32.
        *((engine, 0, PURE, 2 + 4 + 2) for engine in ("plain", "ddp")),
        # Two ranks divide the layers: the shapes here are those of a rank, and two ranks share its states.
        ("fsdp2", 3, "parallel=tp2", 16 * HALF_ROWS / TOTAL),
    ],
)
def test_bytes_at_rest_of_a_parameter(engine: str, stage: int, words: str, each: float) -> None:
    found = row(engine, f"zero=stage{stage} {NONE} {words}")
    assert found is not None
    assert found.resting_bytes == each * TOTAL


def test_a_step_in_torchs_default_form_is_counted_and_fits_perhaps_if_only_a_fused_one_does() -> None:
    words = f"zero=stage0 {NONE} {PURE}"
    found = row("plain", words, given=1, on_gpus=True)
    assert found is not None
    assert (
        found.peak.total == 8 * TOTAL + 2 * (TOTAL - 600 * BLOCKS) + INPUT_BYTES + BUFFER_BYTES
    )  # of the larger group
    less = row("plain", words, found.peak.total - 1, given=1, on_gpus=True)
    assert less is not None
    assert [found.verdict, less.verdict] == ["yes", "perhaps"]
    assert rules_for(found.config, SHAPES).at(Moment.STEP) == 0  # our runs are fused


def test_ranks_on_a_cpu_have_what_is_offloaded_in_the_memory_that_they_compute_in() -> None:
    on_device, on_host = (row("fsdp2", f"zero=stage2 offload={where}") for where in ("none", "optimizer_cpu"))
    assert on_device is not None
    assert on_host is not None
    assert on_device.resting_bytes == on_host.resting_bytes


def test_fsdp2_keeps_the_parameters_of_the_forward_unless_it_gathers_them_again() -> None:
    reshards, keeps = row("fsdp2", "zero=stage3"), row("fsdp2", "zero=stage2")
    assert reshards is not None
    assert keeps is not None
    assert keeps.peak.total - reshards.peak.total == 2 * NUMEL * (BLOCKS - 1)
