"""Bytes of one rank under other engines' rules, as sums of named terms: DeepSpeed, FSDP2, Megatron, nanotron, DDP.

The rules are read from the engines' sources and documents, which each function names. None is measured here;
`benchmarks/published.py` compares them with published measurements. Standard library only.

P is the number of parameters, N the number of data-parallel ranks. Models are assumed to be trained in full with Adam.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from zero_runtime.plan import Partition, ZeroPlan

HALF, SINGLE = 2, 4  # bytes of a 16-bit and of an fp32 number
MASTER_AND_MOMENTS = 12  # fp32 master weight, exp_avg and exp_avg_sq


class Moment(Enum):
    """When a term is allocated."""

    ALWAYS = "always"
    GRADIENTS = "gradients"  # from backward to the step; from the first backward on if micro-batches accumulate
    COMPUTE = "compute"  # in forward and backward
    STEP = "step"  # in the optimizer's step


@dataclass(frozen=True)
class PeerTerm:
    """One line of a prediction: what is allocated, how many bytes, and when."""

    what: str
    nbytes: int
    moment: Moment = Moment.ALWAYS


@dataclass(frozen=True)
class PeerModel:
    """Numbers of elements of the parameters, in the order of forward: of each repeated block, and of all others."""

    blocks: tuple[tuple[int, ...], ...]
    others: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        return sum(self.params)

    @property
    def params(self) -> list[int]:
        return [*self.others, *(numel for block in self.blocks for numel in block)]

    @property
    def largest_block(self) -> int:
        return max((sum(block) for block in self.blocks), default=0)


@dataclass(frozen=True)
class PeerMemory:
    """The terms of one rank under one engine."""

    engine: str
    terms: tuple[PeerTerm, ...]

    def at(self, *moments: Moment) -> int:
        """Bytes of the terms that are allocated at one of the moments."""
        return sum(term.nbytes for term in self.terms if term.moment in moments)

    @property
    def resting(self) -> int:
        """Bytes between the last backward and the step, as in arXiv 1910.02054, section 3.1, without temporaries."""
        return self.at(Moment.ALWAYS, Moment.GRADIENTS)

    def peak(self, activations: int = 0, *, micro_batches: int = 1) -> int:
        """Bytes allocated at the worst moment of a step: in compute, with the peak of one micro-batch's activations
        (bytes), or in the optimizer's step. Gradients exist in compute if earlier micro-batches left them."""
        kept = (Moment.GRADIENTS,) if micro_batches > 1 else ()
        return max(
            self.at(Moment.ALWAYS, Moment.COMPUTE, *kept) + activations,
            self.at(Moment.ALWAYS, Moment.GRADIENTS, Moment.STEP),
        )


@dataclass(frozen=True)
class DeepSpeedSettings:
    """The keys of `zero_optimization` that enter the bytes, in elements, with the defaults of DeepSpeed 0.19.6
    (deepspeed/runtime/zero/config.py).

    overlap_comm: None is true where the plan shards parameters, else false. memory_efficient_linear: holds only for
    models that are built inside `zero.Init`, since only that replaces `torch.nn.functional.linear`. fp32_gradients:
    `data_types.grad_accum_dtype` is fp32.
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


def deepspeed(model: PeerModel, plan: ZeroPlan, world: int, settings: DeepSpeedSettings | None = None) -> PeerMemory:
    """DeepSpeed 0.19.6 in fp16, or in bf16 where the plan shards the optimizer.

    Sources, in deepspeed/runtime: `fp16/fused_optimizer.py` (nothing sharded), `zero/stage_1_and_2.py` and
    `zero/stage3.py`, as each term's function says. The gather of updated parameters writes into the parameters
    themselves (`utils.py`, `all_gather_into_tensor_dp_groups`), so `allgather_bucket_size` adds nothing.
    """
    settings = settings or DeepSpeedSettings()
    if plan.optimizer is Partition.REPLICATED:
        terms = _deepspeed_replicated(model)
    elif plan.params is Partition.REPLICATED:
        terms = _deepspeed_full_params(model, plan, world, settings)
    else:
        terms = _deepspeed_sharded_params(model, world, settings)
    return PeerMemory("DeepSpeed 0.19.6", tuple(terms))


def _deepspeed_replicated(model: PeerModel) -> Iterable[PeerTerm]:
    """`FP16_Optimizer.step` converts every gradient to fp32, then flattens the fp32 tensors: 4P and 4P."""
    numel = model.numel
    yield PeerTerm("16-bit parameters, 2P", HALF * numel)
    yield PeerTerm("master weights and moments, 12P", MASTER_AND_MOMENTS * numel)
    yield PeerTerm("16-bit gradients, 2P", HALF * numel, Moment.GRADIENTS)
    yield PeerTerm("fp32 gradients and their flat copy, 8P", 2 * SINGLE * numel, Moment.STEP)


def _deepspeed_full_params(
    model: PeerModel, plan: ZeroPlan, world: int, settings: DeepSpeedSettings
) -> Iterable[PeerTerm]:
    """`DeepSpeedZeroOptimizer` (stage_1_and_2.py).

    `setup_buckets` allocates the bucket that gradients are copied to, two with overlap_comm; `step` flattens the rank's
    averaged gradients and converts the flat tensor to fp32.
    """
    numel, shard = model.numel, -(-model.numel // world)
    grad_bytes = SINGLE if settings.fp32_gradients else HALF
    yield PeerTerm("16-bit parameters, 2P", HALF * numel)
    if plan.grads is Partition.SHARDED:
        yield PeerTerm(f"gradients, {grad_bytes}P/N", grad_bytes * shard, Moment.GRADIENTS)
    else:
        both = HALF + (SINGLE if settings.fp32_gradients else 0)
        yield PeerTerm(f"gradients, {both}P", both * numel, Moment.GRADIENTS)
    if settings.contiguous_gradients:
        buckets = 2 if settings.overlap_comm else 1
        size = HALF * max(min(settings.reduce_bucket_size, numel), max(model.params, default=0))
        yield PeerTerm(f"{buckets} reduce bucket(s)", buckets * size, Moment.COMPUTE)
    if not settings.optimizer_on_host:
        yield PeerTerm("master weights and moments, 12P/N", MASTER_AND_MOMENTS * shard)
        yield PeerTerm("flat and fp32 gradients, 6P/N", (grad_bytes + SINGLE) * shard, Moment.STEP)


def _deepspeed_sharded_params(model: PeerModel, world: int, settings: DeepSpeedSettings) -> Iterable[PeerTerm]:
    """`DeepSpeedZeroOptimizer_Stage3` (stage3.py) and `PartitionedParameterCoordinator`.

    `_setup_for_real_optimizer` allocates the reduce bucket and the flat shard of the gradients, once.
    Gathered parameters are released once more than max_live_parameters exist. `torch.nn.functional.linear` saves a
    view of the gathered weight for backward, so without `zero.Init`, whose replacement (zero/linear.py) saves ids,
    every gathered weight exists until its backward. `step` works on sub-groups of the shard.
    """
    numel = model.numel
    persistent = sum(numel for numel in model.params if numel < settings.param_persistence_threshold)
    shard = -(-numel // world)
    grad_bytes = SINGLE if settings.fp32_gradients else HALF
    if not settings.params_on_host:
        yield PeerTerm("16-bit parameters, 2P/N", HALF * shard)
    yield PeerTerm("parameters below the persistence threshold", HALF * persistent)
    if settings.contiguous_gradients:
        yield PeerTerm("reduce bucket", HALF * settings.reduce_bucket_size)
    if settings.memory_efficient_linear:
        live = min(numel - persistent, max(settings.max_live_parameters, model.largest_block))
        ahead = min(settings.prefetch_bucket_size, numel - persistent - live)
        yield PeerTerm("live parameters", HALF * live, Moment.COMPUTE)
        yield PeerTerm("prefetched parameters", HALF * ahead, Moment.COMPUTE)
    else:
        yield PeerTerm("gathered weights kept for backward, 2P", HALF * (numel - persistent), Moment.COMPUTE)
    if not settings.optimizer_on_host:
        yield PeerTerm(f"gradients, {grad_bytes}P/N", grad_bytes * shard)
        yield PeerTerm("master weights and moments, 12P/N", MASTER_AND_MOMENTS * shard)
        group = min(settings.sub_group_size, shard)
        yield PeerTerm("flat and fp32 gradients of a sub-group", (grad_bytes + SINGLE) * group, Moment.STEP)


def fsdp2(
    model: PeerModel, world: int, *, gather_bytes: int = HALF, reduce_bytes: int = SINGLE, reshards: bool = True
) -> PeerMemory:
    """FSDP2 (`fully_shard` on every block and on the model), torch 2.13, fp32 parameters, MixedPrecisionPolicy with
    `gather_bytes` for param_dtype and `reduce_bytes` for reduce_dtype (bytes of an element).

    Source: torch/distributed/fsdp/_fully_shard. The all-gather of the next block is issued before the current one is
    used, and its result is copied out into the parameters (`foreach_all_gather`, `foreach_all_gather_copy_out`); the
    previous result is freed one block later (`AllGatherState`). `foreach_reduce` copies a block's gradients into the
    reduce-scatter's input, which exists until the next block's. The root is not resharded after forward.
    """
    numel, block, root = model.numel, model.largest_block, sum(model.others)
    shard = -(-numel // world)
    gathered = block if reshards else numel - root
    terms = [
        PeerTerm("fp32 parameters, 4P/N", SINGLE * shard),
        PeerTerm("moments, 8P/N", 2 * SINGLE * shard),
        PeerTerm("gradients, 4P/N", SINGLE * shard, Moment.GRADIENTS),
        PeerTerm("unsharded parameters of the root", gather_bytes * root, Moment.COMPUTE),
        PeerTerm("unsharded parameters of the blocks in use", gather_bytes * gathered, Moment.COMPUTE),
        PeerTerm("all-gather of the next block", gather_bytes * (block + -(-block // world)), Moment.COMPUTE),
        PeerTerm("unsharded gradients of a block", gather_bytes * block, Moment.COMPUTE),
        PeerTerm("reduce-scatter's input", reduce_bytes * block, Moment.COMPUTE),
    ]
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
        PeerTerm(f"master weights and moments, 12P{'/N' * distributed_optimizer}", MASTER_AND_MOMENTS * split),
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
        PeerTerm("master weights and moments, 12P or 12P/N", MASTER_AND_MOMENTS * split),
    ]
    return PeerMemory("nanotron 0.5", tuple(terms))


def ddp_autocast(model: PeerModel) -> PeerMemory:
    """DistributedDataParallel with autocast and Adam: fp32 parameters, gradients and moments, 16P.

    Sources: torch's documentation of DistributedDataParallel (without `gradient_as_bucket_view` the buckets are a
    second copy of the gradients, 4P) and of autocast (16-bit copies of the weights are cached until the end of
    forward, 2P).
    """
    numel = model.numel
    terms = [
        PeerTerm("fp32 parameters and moments, 12P", 3 * SINGLE * numel),
        PeerTerm("buckets of gradients, 4P", SINGLE * numel),
        PeerTerm("gradients, 4P", SINGLE * numel, Moment.GRADIENTS),
        PeerTerm("16-bit copies of the weights, 2P", HALF * numel, Moment.COMPUTE),
    ]
    return PeerMemory("DDP with autocast", tuple(terms))
