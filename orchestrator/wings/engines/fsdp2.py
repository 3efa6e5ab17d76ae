"""torch's FSDP2: parameters are fp32 shards, which each block gathers for its forward in the dtype of the precision."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from orchestrator.config.schema import RunConfig
from orchestrator.config.strict import Broken
from orchestrator.wings.engines.contract import Task, Updated
from orchestrator.wings.engines.limits import broken_keys, common_problems, computed_as_param
from orchestrator.wings.engines.optimizer_words import step_form
from zero_runtime.offload_plan import Tier
from zero_runtime.plan import Partition
from zero_runtime.precision import ITEMSIZE_BYTES
from zero_runtime.predict.memory import peers
from zero_runtime.predict.memory.peers import PeerMemory, PeerModel

if TYPE_CHECKING:
    import torch

    from zero_runtime.optim.lr_schedule import Rates

PACKAGES, EXTRA = ("torch",), ""
_TORCH_NAME = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def problems_of(config: RunConfig) -> list[Broken]:
    keys, reduce, ranks = settings_of(config), config.precision.dtypes.reduce, config.ranks
    shards, reshard = config.zero.shard_ranks or ranks, keys["reshard_after_forward"]
    # What it sums before it reduces, over micro-batches, is summed in the dtype that it reduces.
    sums = config.batch.accumulation > 1 and (not keys["requires_gradient_sync"] or shards < ranks)
    divides = isinstance(reshard, bool) or (isinstance(reshard, int) and 1 < reshard < shards and shards % reshard == 0)
    found = common_problems(config, "FSDP2 in these runs")
    found += broken_keys(config, settings_of, "reshard_after_forward")
    if config.zero.plan.optimizer is Partition.REPLICATED:
        found.append(Broken("FSDP2 shards", "zero=stage0", ("engine=ddp", "zero=stage1")))
    if sums and reduce != "fp32":
        rule = "FSDP2 sums micro-batches in precision.reduce where it reduces once a step"
        found.append(Broken(rule, reduce, ("precision.reduce=fp32", "batch.accumulation=1")))
    if config.offload.ratio != 1:
        found.append(Broken("offload.ratio must be 1 with FSDP2", str(config.offload.ratio), ("offload.ratio=1.0",)))
    if not divides:
        rule = f"engine.fsdp2.reshard_after_forward must be true, false or a divisor of {shards} ranks between 1 and it"
        found.append(Broken(rule, str(reshard), ("engine.fsdp2.reshard_after_forward=true",)))
    for key in [one for one in ("param_dtype", "reduce_dtype") if keys[one] not in _TORCH_NAME.values()]:
        rule = f"engine.fsdp2.{key} must be one of {', '.join(_TORCH_NAME.values())}"
        found.append(Broken(rule, str(keys[key]), (f"engine.fsdp2.{key}=bfloat16",)))
    return found


def notes_of(config: RunConfig) -> list[str]:
    keys = settings_of(config)
    found = ["embeddings, head and all else outside the blocks are one group, which stays gathered until its backward"]
    if not keys["reshard_after_forward"]:
        found.append("parameters are sharded between two steps, and gathered once in a step")
    if keys["offload"]:
        found.append("CPUOffloadPolicy holds all shards of parameters, gradients and states in host memory")
    return found


def settings_of(config: RunConfig) -> dict[str, Any]:
    plan, dtypes = config.zero.plan, config.precision.dtypes
    whole_grads = plan.grads is not Partition.SHARDED or config.zero.reduce_at_boundary
    offloads = Tier.HOST in (config.offload.params, config.offload.optimizer)
    given = {
        "reshard_after_forward": plan.params is Partition.SHARDED,
        # Of each micro-batch. The last one always reshards and reduces.
        "reshard_after_backward": plan.params is Partition.SHARDED,
        "requires_gradient_sync": not whole_grads,
        "param_dtype": _TORCH_NAME[dtypes.param],
        "reduce_dtype": _TORCH_NAME[dtypes.reduce],
        "cast_forward_inputs": True,
        "offload": offloads,
        "pin_memory": offloads and config.resources.device == "cuda",
    }
    return {**given, **config.engine.native}


def memory_of(model: PeerModel, config: RunConfig) -> PeerMemory | None:
    keys, dtypes = settings_of(config), config.precision.dtypes
    if config.zero.plan.optimizer is Partition.REPLICATED:
        return None
    return peers.fsdp2(
        model,
        config.zero.shard_ranks or config.data_ranks,
        *(ITEMSIZE_BYTES[dtype] for dtype in (dtypes.param, dtypes.reduce, dtypes.master)),
        reshards=bool(keys["reshard_after_forward"]),
        keeps_grads=config.batch.accumulation > 1 and not keys["requires_gradient_sync"],
        on_host=keys["offload"],
        step=step_form(config, by_default=model.by_default),
    )


def meaning(config: RunConfig) -> RunConfig:
    return computed_as_param(replace(config, zero=replace(config.zero, prefetch=1)))


def build(task: Task) -> Fsdp2Engine:
    return Fsdp2Engine(task)


class Fsdp2Engine:
    def __init__(self, task: Task) -> None:
        import torch
        from torch import nn
        from torch.distributed.tensor import distribute_tensor

        from orchestrator.wings.engines import torch_optimizer
        from zero_runtime.unit_planner import move_buffers

        self._local, self._keys = torch_optimizer.local, settings_of(task.config)
        self.module = task.model
        mesh, placements = self._mesh(task)
        # What is not trained needs no fp32: it is held as it is gathered.
        gathered, resting = getattr(torch, self._keys["param_dtype"]), "cpu" if self._keys["offload"] else task.device
        shards: dict[int, nn.Parameter] = {}
        for name, param in self.module.named_parameters():  # first values are drawn before anything is sharded
            value = task.first_value(name, param).to(torch.float32 if param.requires_grad else gathered)
            param.data = param.data.to(value.dtype)  # on the meta device
            # Without a source each rank takes its part of its own value. The clone lets the rest of it go.
            part = distribute_tensor(value, mesh, placements, src_data_rank=None).clone().to(resting)
            shards[id(param)] = nn.Parameter(part, requires_grad=param.requires_grad)
        names = self.module.named_parameters(remove_duplicate=False)
        by_name = {name: shards[id(param)] for name, param in names}  # what is tied is one parameter by two names
        self._shard(mesh)
        self.module.load_state_dict(by_name, strict=False, assign=True)
        move_buffers(self.module, task.device)
        self._shards = dict(self.module.named_parameters())
        trained = ((name, one) for name, one in self._shards.items() if one.requires_grad)
        self._update = torch_optimizer.Update(task.config, trained)

    def _mesh(self, task: Task) -> tuple[Any, list[Any]]:
        """The ranks, as groups that shard; and how each parameter is placed on them."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard

        kind, ranks = task.device.type, task.config.ranks
        shards = task.config.zero.shard_ranks or ranks
        names = ("replicate", "shard") if shards < ranks else ("shard",)
        sizes = (ranks // shards, shards)[-len(names) :]
        # The norm of what is offloaded is summed in host memory, which NCCL does not send.
        both: Any = dict.fromkeys(names, "cpu:gloo,cuda:nccl") if self._keys["offload"] and kind == "cuda" else None
        mesh = init_device_mesh(kind, sizes, mesh_dim_names=names, backend_override=both)
        return mesh, [Replicate(), Shard(0)][-len(names) :]

    def _shard(self, mesh: Any) -> None:
        import torch
        from torch.distributed import fsdp

        from zero_runtime.unit_planner import block_modules

        dtypes = {key: getattr(torch, self._keys[key]) for key in ("param_dtype", "reduce_dtype")}
        policy = fsdp.MixedPrecisionPolicy(**dtypes, cast_forward_inputs=self._keys["cast_forward_inputs"])
        offload = fsdp.CPUOffloadPolicy(self._keys["pin_memory"]) if self._keys["offload"] else fsdp.OffloadPolicy()
        for module in [*block_modules(self.module), self.module]:
            # None is false for the root alone: its backward would gather at once what its forward has let go.
            reshard = None if module is self.module else self._keys["reshard_after_forward"]
            sharded = fsdp.fully_shard(
                module, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=offload
            )
            # Sums, as the loss is this rank's share: a mean would round once more.
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)

    def before_micro_batch(self, *, last: bool) -> None:
        module: Any = self.module
        module.set_requires_gradient_sync(last or self._keys["requires_gradient_sync"])
        module.set_requires_all_reduce(last)
        module.set_reshard_after_backward(last or self._keys["reshard_after_backward"])

    def backward(self, loss: torch.Tensor) -> None:
        self._update.scaled(loss).backward()  # type: ignore[no-untyped-call]

    def step(self, rates: Rates) -> Updated:
        return self._update.step(rates)

    def held(self) -> Mapping[str, Sequence[torch.Tensor]]:
        trained = [self._local(one) for one in self._shards.values() if one.requires_grad]
        frozen = [self._local(one) for one in self._shards.values() if not one.requires_grad]
        in_fp32 = self._keys["param_dtype"] == "float32"
        weights = {"params": [*trained, *frozen]} if in_fp32 else {"params": frozen, "master": trained}
        return {**weights, "grads": self._update.grads(), **self._update.states()}

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, one.full_tensor().detach()) for name, one in self._shards.items())  # type: ignore[attr-defined]

    def begin_again(self, values: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._update.begin_again(values)

    def close(self) -> None:
        del self.module, self._update
