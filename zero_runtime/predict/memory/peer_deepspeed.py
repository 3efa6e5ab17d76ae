"""Bytes of one rank under DeepSpeed's rules, as sums of named terms. Standard library only.

P, T and N are those of peers.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from zero_runtime.plan import Partition, ZeroPlan
from zero_runtime.predict.memory.peers import (
    GRADS,
    HALF,
    OPTIMIZER,
    PARAMS,
    SINGLE,
    Moment,
    PeerMemory,
    PeerModel,
    PeerTerm,
    placed,
    weights_terms,
)


@dataclass(frozen=True)
class DeepSpeedSettings:
    """The keys of `zero_optimization` that enter the bytes, in elements, with the defaults of DeepSpeed 0.19.8
    (deepspeed/runtime/zero/config.py).

    overlap_comm: None is true where the plan shards parameters, else false. memory_efficient_linear: holds only for
    models that are built inside `zero.Init`, since only that replaces `torch.nn.functional.linear`. fp32_gradients:
    `data_types.grad_accum_dtype` is fp32. fused: the optimizer is DeepSpeed's FusedAdam. bf16: the 16-bit weights are.
    autocast: `torch_autocast` is enabled, which casts fp32 weights for each operation. accumulates: several
    micro-batches make a step. immediate_grad_update: `bf16.immediate_grad_update`, with which BF16_Optimizer drops each
    16-bit gradient once it is added to the fp32 one. half_states: `bf16.bf16_master_weights_and_grads` and
    `bf16.bf16_optimizer_states`: masters and the gradients of the step are in 16 bits too, copies of the weights as
    the fp32 ones are.
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
    half_states: bool = False


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
    yield from weights_terms(model, weights, trained, "T")
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
    masters = HALF if settings.half_states else SINGLE
    yield from placed(settings.optimizer_on_host, weights_terms(model, HALF, shard, "T/N", masters))
    if settings.optimizer_on_host:
        yield PeerTerm("fp32 gradients, 4T/N", SINGLE * shard, state=GRADS, on_host=True)
        copies = 1 + (settings.accumulates and not sums_apart)
        yield PeerTerm("copies of parameters and of earlier gradients", copies * weights * shard, on_host=True)
        yield from (PeerTerm("buffer of a gradient", weights * model.largest, on_host=host) for host in (True, False))
    elif not by_bf16_optimizer:
        converted = SINGLE if grad_bytes == HALF and not settings.half_states else 0
        yield PeerTerm("flat and fp32 gradients", (grad_bytes + converted) * shard, Moment.STEP)


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
    masters = HALF if settings.half_states else SINGLE
    parameters = PeerTerm(f"parameters, {weights}P/N", weights * shard, state=PARAMS)
    yield from placed(settings.params_on_host, [parameters])
    yield PeerTerm("parameters below the persistence threshold", weights * padded, state=PARAMS)
    if settings.contiguous_gradients:
        yield PeerTerm("reduce bucket", weights * settings.reduce_bucket_size)
    if settings.memory_efficient_linear:
        live = min(numel - persistent, max(settings.max_live_parameters, model.largest_block))
        ahead = min(settings.prefetch_bucket_size, numel - persistent - live)
        yield PeerTerm("live parameters", weights * live, Moment.COMPUTE, each=weights)
        yield PeerTerm("prefetched parameters", weights * ahead, Moment.COMPUTE)
    else:
        kept = weights * (numel - persistent)
        yield PeerTerm(f"gathered weights kept for backward, {weights}P", kept, Moment.COMPUTE, each=weights)
    gradients = PeerTerm(f"gradients, {grad_bytes}T/N", grad_bytes * trained, state=GRADS)
    yield from placed(settings.optimizer_on_host, [gradients, *weights_terms(model, HALF, trained, "T/N", masters)])
    if settings.optimizer_on_host:  # `_offload_grad_partition_at_boundary`
        yield PeerTerm("fp32 gradients of the sub-groups, 4T/N", SINGLE * trained, state=GRADS, on_host=True)
    else:
        converted = SINGLE if grad_bytes == HALF and not settings.half_states else 0
        group = min(settings.sub_group_size, trained)
        yield PeerTerm("flat and fp32 gradients of a sub-group", (grad_bytes + converted) * group, Moment.STEP)
