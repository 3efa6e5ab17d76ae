"""Bytes of one rank under other engines' rules, as sums of named terms: DeepSpeed, FSDP2, DDP, plain PyTorch, Megatron,
nanotron.

The rules are read from the engines' sources and documents, which each function names. What a rank holds between its
last backward and the step (`states`) is compared with counted tensors by tests/orchestrator/wings/engines;
`benchmarks/published.py` compares peaks with published measurements. Standard library only.

P is the number of parameters, T of those that are trained, N the number of data-parallel ranks. With 16-bit weights the
optimizer updates fp32 masters; in fp32 the weights are their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from math import prod
from typing import NamedTuple

from zero_runtime.plan import Partition, ZeroPlan

HALF, SINGLE = 2, 4  # bytes of a 16-bit and of an fp32 number
ADAM = 2.0 * SINGLE  # bytes of exp_avg and exp_avg_sq for a trained element
PARAMS, GRADS, OPTIMIZER = "params", "grads", "optimizer"


class Moment(Enum):
    """When a term is allocated."""

    ALWAYS = "always"
    GRADIENTS = "gradients"  # from backward to the step; from the first backward on if micro-batches accumulate
    COMPUTE = "compute"  # in forward and backward
    STEP = "step"  # in the optimizer's step


@dataclass(frozen=True)
class PeerTerm:
    """One line of a prediction: what is allocated, how many bytes, and when. state: the component of the model states
    that the term is; empty for what is none. on_host: in the host's memory, by offload."""

    what: str
    nbytes: int
    moment: Moment = Moment.ALWAYS
    state: str = ""
    on_host: bool = False


class PeerParam(NamedTuple):
    """A parameter of the full model. decays: whether the optimizer has it in its group with weight decay."""

    shape: tuple[int, ...]
    trained: bool = True
    decays: bool = True

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def rows_of(self, world: int) -> int:
        """Elements of the first of `world` equal parts by its first dimension, which is the largest part."""
        first = self.shape[0] if self.shape else 1
        return -(-first // world) * (self.numel // first)


@dataclass(frozen=True)
class PeerModel:
    """The parameters in the order of forward: of each repeated block, and all others. state_bytes: of the optimizer's
    states for a trained element."""

    blocks: tuple[tuple[PeerParam, ...], ...]
    others: tuple[PeerParam, ...] = ()
    state_bytes: float = ADAM

    @classmethod
    def of_numels(cls, blocks: Iterable[Iterable[int]], others: Iterable[int] = ()) -> PeerModel:
        """A model that is trained in full with Adam, from the numbers of elements of its parameters."""
        made = [tuple(PeerParam((numel,)) for numel in block) for block in blocks]
        return cls(tuple(made), tuple(PeerParam((numel,)) for numel in others))

    @property
    def params(self) -> list[PeerParam]:
        return [*self.others, *(param for block in self.blocks for param in block)]

    @property
    def numel(self) -> int:
        return sum(param.numel for param in self.params)

    @property
    def trained(self) -> list[PeerParam]:
        return [param for param in self.params if param.trained]

    @property
    def trained_numel(self) -> int:
        return sum(param.numel for param in self.trained)

    @property
    def largest_block(self) -> int:
        return max((sum(param.numel for param in block) for block in self.blocks), default=0)

    @property
    def largest_trained_block(self) -> int:
        return max((sum(param.numel for param in block if param.trained) for block in self.blocks), default=0)

    @property
    def largest(self) -> int:
        """Elements of the largest trained parameter."""
        return max((param.numel for param in self.trained), default=0)

    def group_shard(self, world: int, multiple: int) -> int:
        """Elements of a rank's equal part of the optimizer's groups, each flattened and padded to a multiple."""
        groups = [sum(one.numel for one in self.trained if one.decays is decays) for decays in (True, False)]
        return sum(-(-group // multiple) * multiple // world for group in groups)


@dataclass(frozen=True)
class PeerMemory:
    """The terms of one rank under one engine."""

    engine: str
    terms: tuple[PeerTerm, ...]

    def at(self, *moments: Moment) -> int:
        """Bytes on the device of the terms that are allocated at one of the moments."""
        return sum(term.nbytes for term in self.terms if term.moment in moments and not term.on_host)

    @property
    def host_bytes(self) -> int:
        """Bytes in the host's memory, by offload."""
        return sum(term.nbytes for term in self.terms if term.on_host)

    @property
    def states(self) -> dict[str, int]:
        """Bytes of the model states on the device by component, between the last backward and the step."""
        found = dict.fromkeys((PARAMS, GRADS, OPTIMIZER), 0)
        for term in self.terms:
            if term.state and not term.on_host:
                found[term.state] += term.nbytes
        return found

    @property
    def resting(self) -> int:
        """Bytes between the last backward and the step, as in arXiv 1910.02054, section 3.1, without temporaries."""
        return self.at(Moment.ALWAYS, Moment.GRADIENTS)

    def worst(self, activations: int = 0, *, micro_batches: int = 1) -> tuple[Moment, ...]:
        """The moments whose terms exist at the worst time of a step: in compute, with the peak of one micro-batch's
        activations (bytes), or in the optimizer's step. Gradients exist in compute if earlier micro-batches left
        them."""
        kept = (Moment.GRADIENTS,) if micro_batches > 1 else ()
        compute, step = (Moment.ALWAYS, Moment.COMPUTE, *kept), (Moment.ALWAYS, Moment.GRADIENTS, Moment.STEP)
        return compute if self.at(*compute) + activations >= self.at(*step) else step

    def peak(self, activations: int = 0, *, micro_batches: int = 1) -> int:
        """Bytes allocated then."""
        moments = self.worst(activations, micro_batches=micro_batches)
        return self.at(*moments) + (activations if Moment.COMPUTE in moments else 0)


def _weights(model: PeerModel, weights: int, trained: int, what: str = "P") -> Iterator[PeerTerm]:
    """The terms of the optimizer for so many trained elements on this rank: states, and masters of 16-bit weights.
    weights: bytes of an element of those that compute."""
    if weights == HALF:
        yield PeerTerm(f"fp32 master weights, 4{what}", SINGLE * trained, state=OPTIMIZER)
    states = round(model.state_bytes * trained)
    yield PeerTerm(f"optimizer's states, {model.state_bytes:g}{what}", states, state=OPTIMIZER)


def _on(host: bool, terms: Iterable[PeerTerm]) -> Iterator[PeerTerm]:
    """The terms, in the host's memory if `host`."""
    return (replace(term, on_host=host) for term in terms)


@dataclass(frozen=True)
class DeepSpeedSettings:
    """The keys of `zero_optimization` that enter the bytes, in elements, with the defaults of DeepSpeed 0.19.8
    (deepspeed/runtime/zero/config.py).

    overlap_comm: None is true where the plan shards parameters, else false. memory_efficient_linear: holds only for
    models that are built inside `zero.Init`, since only that replaces `torch.nn.functional.linear`. fp32_gradients:
    `data_types.grad_accum_dtype` is fp32. fused: the optimizer is DeepSpeed's FusedAdam. bf16: the 16-bit weights are.
    autocast: `torch_autocast` is enabled, which casts fp32 weights for each operation. accumulates: several
    micro-batches make a step. immediate_grad_update: `bf16.immediate_grad_update`, with which BF16_Optimizer drops each
    16-bit gradient once it is added to the fp32 one.
    """

    reduce_bucket_size: int = 500_000_000
    prefetch_bucket_size: int = 50_000_000
    max_live_parameters: int = 1_000_000_000
    param_persistence_threshold: int = 100_000
    sub_group_size: int = 1_000_000_000
    overlap_comm: bool | None = None
    contiguous_gradients: bool = True
    memory_efficient_linear: bool = True
    fp32_gradients: bool = False
    optimizer_on_host: bool = False
    params_on_host: bool = False
    fused: bool = True
    bf16: bool = True
    autocast: bool = False
    accumulates: bool = False
    immediate_grad_update: bool = False


def deepspeed(
    model: PeerModel,
    plan: ZeroPlan,
    world: int,
    settings: DeepSpeedSettings | None = None,
    *,
    weights: int = HALF,
) -> PeerMemory:
    """DeepSpeed 0.19.8. weights: bytes of an element of the weights that compute.

    Sources, in deepspeed/runtime: `engine.py`, `fp16/fused_optimizer.py` (nothing sharded), `bf16_optimizer.py`,
    `zero/stage_1_and_2.py` and `zero/stage3.py`, as each term's function says. The gather of updated parameters writes
    into the parameters themselves (`utils.py`, `all_gather_into_tensor_dp_groups`), so `allgather_bucket_size` adds
    nothing.
    """
    settings = settings or DeepSpeedSettings()
    if plan.optimizer is Partition.REPLICATED:
        terms = _deepspeed_replicated(model, settings, weights)
    elif plan.params is Partition.REPLICATED:
        terms = _deepspeed_full_params(model, plan, world, settings, weights)
    else:
        terms = _deepspeed_sharded_params(model, world, settings, weights)
    return PeerMemory("DeepSpeed 0.19.8", tuple(terms))


def _deepspeed_replicated(model: PeerModel, settings: DeepSpeedSettings, weights: int) -> Iterable[PeerTerm]:
    """In 16 bits `FP16_Optimizer.step` converts every gradient to fp32, then flattens the fp32 tensors: 4T and 4T;
    `FP16_UnfusedOptimizer` converts alone. In fp32 `_do_optimizer_sanity_check` (engine.py) leaves the optimizer as it
    is. `allreduce_bucket` sends a flat copy of a bucket of gradients, once they are all there."""
    trained, bucket = model.trained_numel, min(settings.reduce_bucket_size, model.trained_numel)
    state = OPTIMIZER if settings.autocast else PARAMS  # fp32 weights that compute in 16 bits are masters
    yield PeerTerm(f"parameters, {weights}T", weights * trained, state=state)
    frozen = (model.numel - trained) * (HALF if settings.autocast else weights)
    yield PeerTerm("frozen parameters", frozen, state=PARAMS)
    if settings.autocast:
        yield PeerTerm("16-bit copies of the weights, 2T", HALF * trained, Moment.COMPUTE)
    yield from _weights(model, weights, trained, "T")
    yield PeerTerm(f"gradients, {weights}T", weights * trained, Moment.GRADIENTS, GRADS)
    if weights == SINGLE:
        yield PeerTerm("flat copy of a bucket of gradients", SINGLE * bucket, Moment.STEP)
    elif settings.fused:
        yield PeerTerm("fp32 gradients and their flat copy, 8T", 2 * SINGLE * trained, Moment.STEP)
    else:
        yield PeerTerm("fp32 gradients, 4T", SINGLE * trained, Moment.STEP)


def _deepspeed_full_params(
    model: PeerModel, plan: ZeroPlan, world: int, settings: DeepSpeedSettings, weights: int
) -> Iterable[PeerTerm]:
    """`DeepSpeedZeroOptimizer` (stage_1_and_2.py), and `BF16_Optimizer` for stage 1 in bf16 with fp32 gradients.

    Each group of the optimizer is one flat tensor, padded to a multiple of 2N (`nccl_start_alignment_factor`).
    `setup_buckets` allocates the bucket that gradients are copied to, two with overlap_comm; `step` flattens the rank's
    averaged gradients and converts the flat tensor to fp32. BF16_Optimizer has no bucket: it allocates the flat fp32
    gradients once, adds each backward's 16-bit gradients to them, and `allreduce_bucket` (engine.py) sends a copy. With
    offload the rank's gradients go to flat fp32 tensors on the host, which stay; fp32 sums of 16-bit gradients are flat
    on the device first, and at stage 1 those of other parts stay views of the bucket until the step. After the last
    backward `_clear_param_grad_only` leaves the gradients of the rank's own part alone, whatever is sharded; a
    parameter that is in the parts of two ranks leaves all of its gradient, if that is not converted.
    """
    shard = model.group_shard(world, 2 * world)
    flat, frozen = shard * world, model.numel - model.trained_numel
    grad_bytes = SINGLE if settings.fp32_gradients else weights
    sums_apart = weights == HALF and settings.fp32_gradients
    keeps_fp32 = sums_apart and plan.grads is Partition.REPLICATED
    by_bf16_optimizer = keeps_fp32 and settings.bf16 and not settings.optimizer_on_host
    yield PeerTerm(f"parameters, {weights}P", weights * (flat + frozen), state=PARAMS)
    if by_bf16_optimizer:
        yield PeerTerm("fp32 gradients, 4T", SINGLE * flat, state=GRADS)
        if not settings.immediate_grad_update:
            yield PeerTerm("16-bit gradients, 2T", HALF * model.trained_numel, Moment.GRADIENTS, GRADS)
        yield PeerTerm("copy of a bucket of gradients", SINGLE * min(settings.reduce_bucket_size, flat), Moment.STEP)
    else:
        if sums_apart or not settings.optimizer_on_host:
            yield PeerTerm(f"gradients, {grad_bytes}T/N", grad_bytes * shard, Moment.GRADIENTS, GRADS)
        if plan.grads is Partition.REPLICATED and settings.accumulates:
            whole = grad_bytes * (model.trained_numel - shard)
            yield PeerTerm("whole gradients of earlier micro-batches", whole, Moment.COMPUTE)
    if settings.contiguous_gradients and not by_bf16_optimizer:
        buckets = 2 if settings.overlap_comm else 1
        size = max(settings.reduce_bucket_size, model.largest)
        size = min(size, max(model.trained_numel, model.largest))
        each = SINGLE if keeps_fp32 else weights  # `_gradient_reduction_buffer_dtype`
        kept = (Moment.ALWAYS, GRADS) if keeps_fp32 and settings.optimizer_on_host else (Moment.COMPUTE, "")
        yield PeerTerm(f"{buckets} reduce bucket(s)", buckets * each * size, *kept)
    # In fp32 too there are masters: the flat parameters are cloned.
    yield from _on(settings.optimizer_on_host, _weights(model, HALF, shard, "T/N"))
    if settings.optimizer_on_host:
        yield PeerTerm("fp32 gradients, 4T/N", SINGLE * shard, state=GRADS, on_host=True)
        copies = 1 + (settings.accumulates and not sums_apart)
        yield PeerTerm("copies of parameters and of earlier gradients", copies * weights * shard, on_host=True)
        yield from (PeerTerm("buffer of a gradient", weights * model.largest, on_host=host) for host in (True, False))
    elif not by_bf16_optimizer:
        yield PeerTerm(
            "flat and fp32 gradients", (HALF + SINGLE if grad_bytes == HALF else SINGLE) * shard, Moment.STEP
        )


def _deepspeed_sharded_params(
    model: PeerModel, world: int, settings: DeepSpeedSettings, weights: int
) -> Iterable[PeerTerm]:
    """`DeepSpeedZeroOptimizer_Stage3` (stage3.py) and `PartitionedParameterCoordinator`.

    Each parameter is partitioned alone and padded to a multiple of N (`partition_parameters.py`).
    `_setup_for_real_optimizer` allocates the reduce bucket and the flat shard of the gradients, once. In fp32 too there
    are masters: `_create_fp32_partitions` compares a device with its name, so that it always clones the flat shard.
    Gathered parameters are released once more than max_live_parameters exist. `torch.nn.functional.linear` saves a
    view of the gathered weight for backward, so without `zero.Init`, whose replacement (zero/linear.py) saves ids,
    every gathered weight exists until its backward. `step` works on sub-groups of the shard.
    """
    numel = model.numel
    small = [one.numel for one in model.params if one.numel < settings.param_persistence_threshold]
    persistent, padded = sum(small), sum(-(-one // world) * world for one in small)
    shard = sum(-(-one.numel // world) for one in model.params)
    trained = sum(-(-one.numel // world) for one in model.trained)
    grad_bytes = SINGLE if settings.fp32_gradients else weights
    parameters = PeerTerm(f"parameters, {weights}P/N", weights * shard, state=PARAMS)
    yield from _on(settings.params_on_host, [parameters])
    yield PeerTerm("parameters below the persistence threshold", weights * padded, state=PARAMS)
    if settings.contiguous_gradients:
        yield PeerTerm("reduce bucket", weights * settings.reduce_bucket_size)
    if settings.memory_efficient_linear:
        live = min(numel - persistent, max(settings.max_live_parameters, model.largest_block))
        ahead = min(settings.prefetch_bucket_size, numel - persistent - live)
        yield PeerTerm("live parameters", weights * live, Moment.COMPUTE)
        yield PeerTerm("prefetched parameters", weights * ahead, Moment.COMPUTE)
    else:
        kept = weights * (numel - persistent)
        yield PeerTerm(f"gathered weights kept for backward, {weights}P", kept, Moment.COMPUTE)
    gradients = PeerTerm(f"gradients, {grad_bytes}T/N", grad_bytes * trained, state=GRADS)
    yield from _on(settings.optimizer_on_host, [gradients, *_weights(model, HALF, trained, "T/N")])
    if settings.optimizer_on_host:  # `_offload_grad_partition_at_boundary`
        yield PeerTerm("fp32 gradients of the sub-groups, 4T/N", SINGLE * trained, state=GRADS, on_host=True)
    else:
        converted = SINGLE if grad_bytes == HALF else 0
        group = min(settings.sub_group_size, trained)
        yield PeerTerm("flat and fp32 gradients of a sub-group", (grad_bytes + converted) * group, Moment.STEP)


def fsdp2(
    model: PeerModel,
    world: int,
    *,
    gather_bytes: int = HALF,
    reduce_bytes: int = SINGLE,
    reshards: bool = True,
    keeps_grads: bool = False,
    on_host: bool = False,
) -> PeerMemory:
    """FSDP2 (`fully_shard` on every block and on the model), torch 2.13, trained parameters in fp32 and frozen ones as
    they are gathered, MixedPrecisionPolicy with `gather_bytes` for param_dtype and `reduce_bytes` for reduce_dtype
    (bytes of an element). reshards: after forward. keeps_grads: earlier micro-batches leave unsharded gradients
    (`set_requires_gradient_sync(False)`). on_host: CPUOffloadPolicy.

    Source: torch/distributed/fsdp/_fully_shard. A rank has whole rows of each parameter (`_init_sharded_param`: rank 0
    the most). The all-gather of the next block is issued before the current one is used, and its result is copied out
    into the parameters (`foreach_all_gather`, `foreach_all_gather_copy_out`); the previous result is freed one block
    later (`AllGatherState`). `foreach_reduce` copies a block's gradients into the reduce-scatter's input, which exists
    until the next block's. The root is not resharded after forward.
    """
    numel, block, root = model.numel, model.largest_block, sum(one.numel for one in model.others)
    shard, trained = (sum(one.rows_of(world) for one in params) for params in (model.params, model.trained))
    gathered = block if reshards else numel - root
    states = [
        # fp32 weights that compute in 16 bits are masters.
        PeerTerm("fp32 parameters, 4T/N", SINGLE * trained, state=PARAMS if gather_bytes == SINGLE else OPTIMIZER),
        PeerTerm("frozen parameters", gather_bytes * (shard - trained), state=PARAMS),
        PeerTerm("optimizer's states", round(model.state_bytes * trained), state=OPTIMIZER),
        PeerTerm("gradients, 4T/N", SINGLE * trained, Moment.GRADIENTS, GRADS),
    ]
    terms = [
        *_on(on_host, states),
        PeerTerm("unsharded parameters of the root", gather_bytes * root, Moment.COMPUTE),
        PeerTerm("unsharded parameters of the blocks in use", gather_bytes * gathered, Moment.COMPUTE),
        PeerTerm("all-gather of the next block", gather_bytes * (block + -(-block // world)), Moment.COMPUTE),
        PeerTerm("unsharded gradients of a block", gather_bytes * model.largest_trained_block, Moment.COMPUTE),
        PeerTerm("reduce-scatter's input", reduce_bytes * model.largest_trained_block, Moment.COMPUTE),
    ]
    if keeps_grads:
        kept = reduce_bytes * model.trained_numel
        terms.append(PeerTerm("unsharded gradients of earlier micro-batches", kept, Moment.COMPUTE))
    return PeerMemory("FSDP2 2.13", tuple(terms))


def megatron(model: PeerModel, world: int, *, distributed_optimizer: bool) -> PeerMemory:
    """Megatron-Core with bf16 parameters and fp32 gradients: 18P, or 6P + 12P/N with the distributed optimizer.

    Source: Megatron Core User Guide, "Distributed Optimizer", table of bytes per parameter. The gradient buffer is
    allocated once (core/distributed/param_and_grad_buffer.py).
    """
    split = -(-model.numel // world) if distributed_optimizer else model.numel
    terms = [
        PeerTerm("bf16 parameters, 2P", HALF * model.numel),
        PeerTerm("fp32 gradient buffer, 4P", SINGLE * model.numel),
        *_weights(model, HALF, split, "P/N" if distributed_optimizer else "P"),
    ]
    return PeerMemory("Megatron Core", tuple(terms))


def nanotron(model: PeerModel, plan: ZeroPlan, world: int) -> PeerMemory:
    """nanotron 0.5 in bf16 with fp32 accumulation: 20P, or 8P + 12P/N where the optimizer is sharded.

    Source: the Ultra-Scale Playbook, section "Zero Redundancy Optimizer" (fp32 gradients are 4P more than the paper's
    16P), and nanotron/optim/gradient_accumulator.py. It shards nothing else.
    """
    split = -(-model.numel // world) if plan.optimizer is Partition.SHARDED else model.numel
    terms = [
        PeerTerm("bf16 parameters and gradients, 4P", 2 * HALF * model.numel),
        PeerTerm("fp32 accumulated gradients, 4P", SINGLE * model.numel),
        *_weights(model, HALF, split),
    ]
    return PeerMemory("nanotron 0.5", tuple(terms))


def ddp(model: PeerModel, *, weights: int = HALF, views: bool = True) -> PeerMemory:
    """DistributedDataParallel: fp32 parameters, gradients and optimizer's states, 16P; in 16 bits by autocast.

    Sources: torch's documentation of DistributedDataParallel (views: with `gradient_as_bucket_view` the gradients are
    views of the buckets, which stay; without it the buckets are a second copy of them, 4T) and of autocast (16-bit
    copies of the trained weights are cached until the end of forward, 2T; the others are held in 16 bits).
    """
    trained = model.trained_numel
    autocast = weights == HALF  # fp32 weights that compute in 16 bits are masters
    terms = [
        PeerTerm("fp32 parameters, 4T", SINGLE * trained, state=OPTIMIZER if autocast else PARAMS),
        PeerTerm("frozen parameters", weights * (model.numel - trained), state=PARAMS),
        PeerTerm("optimizer's states", round(model.state_bytes * trained), state=OPTIMIZER),
        PeerTerm("buckets of gradients, 4T", SINGLE * trained, state=GRADS if views else ""),
    ]
    if not views:
        terms.append(PeerTerm("gradients, 4T", SINGLE * trained, Moment.GRADIENTS, GRADS))
    if autocast:
        terms.append(PeerTerm("16-bit copies of the weights, 2T", HALF * trained, Moment.COMPUTE))
    return PeerMemory("DDP with autocast" if autocast else "DDP", tuple(terms))


def plain(model: PeerModel, *, weights: int = HALF, has_masters: bool = True) -> PeerMemory:
    """PyTorch in one process (orchestrator/wings/engines/plain.py). has_masters: the weights are rounded to 16 bits,
    whatever they are held in, and each one's gradient is added to its master's as soon as it is there."""
    terms = [
        PeerTerm(f"parameters, {weights}P", weights * model.numel, state=PARAMS),
        *_weights(model, HALF if has_masters else weights, model.trained_numel, "T"),
        PeerTerm("fp32 gradients, 4T", SINGLE * model.trained_numel, Moment.GRADIENTS, GRADS),
    ]
    if has_masters:
        terms.append(PeerTerm("gradient of one parameter", weights * model.largest, Moment.COMPUTE))
    return PeerMemory("plain PyTorch", tuple(terms))
