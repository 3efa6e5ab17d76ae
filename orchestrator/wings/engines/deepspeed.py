"""DeepSpeed's ZeRO, stages 0 to 3, with an optimizer of torch. What is said of it was read in the source of 0.19.8."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from orchestrator.config.schema import Device, RunConfig
from orchestrator.config.strict import Broken
from orchestrator.wings.engines import deepspeed_again, deepspeed_bytes
from orchestrator.wings.engines.contract import Task, Updated
from orchestrator.wings.engines.deepspeed_keys import broken_keys, by_bf16_optimizer, without_unused_norm
from orchestrator.wings.engines.limits import common_problems, computed_as_param, merged
from zero_runtime.limits import values_of
from zero_runtime.offload_plan import Tier
from zero_runtime.predict.memory.peers import PeerMemory, PeerModel

if TYPE_CHECKING:
    import torch

    from zero_runtime.optim.lr_schedule import Rates

PACKAGES, EXTRA = ("deepspeed", "torch"), "deepspeed"


def problems_of(config: RunConfig) -> list[Broken]:
    zero, offload, scale = config.zero, config.offload, config.precision.scale
    fp16, on_gpu = config.precision.dtypes.param == "fp16", config.resources.device is Device.cuda
    on_host, whole = offload.optimizer is Tier.HOST, not fp16 or scale.minimum == int(scale.minimum)
    asked = (
        (zero.stage > 0 or not fp16, "sums fp16 gradients in fp16 at stage 0", "precision=fp16", "zero=stage1"),
        (on_gpu or not fp16, "trains fp16 on a GPU", "resources.device=cpu", "precision=bf16"),
        (whole, "has whole numbers as scales", "precision.min_loss_scale", "precision.min_loss_scale=1"),
        (zero.stage > 0 or not on_host, "offloads nothing at stage 0", "offload.optimizer", "zero=stage1"),
        (offload.ratio == 1, "offloads all or nothing", "offload.ratio", "offload.ratio=1.0"),
        # MiCS is gone from DeepSpeed.
        (zero.shard_ranks is None, "shards over all ranks", "zero.shard_ranks", "zero.shard_ranks=null"),
    )
    found = [Broken(f"DeepSpeed in these runs {rule}", one, (fix,)) for holds, rule, one, fix in asked if not holds]
    return [*common_problems(config, "DeepSpeed in these runs"), *found, *broken_keys(config.engine.native)]


def notes_of(config: RunConfig) -> list[str]:
    stage, param, keys = config.zero.stage, config.precision.dtypes.param, settings_of(config)
    wrapper, clips = by_bf16_optimizer(config), keys["gradient_clipping"] or config.precision.scales_loss
    told = (
        (stage == 0 and param == "bf16", "stage 0 in bf16 is torch_autocast over fp32 weights: else it sums in bf16"),
        (stage == 0 and config.optimizer.clip_norm, "stage 0 clips without telling the norm"),
        (not clips and keys["zero_optimization"].get("compute_grad_norm", stage), "the norm is computed, but not used"),
        (True, "the optimizer is torch's, fused, in the place of FusedAdam and DeepSpeedCPUAdam"),
        (wrapper, "stage 1 in bf16 (BF16_Optimizer) all-reduces fp32 gradients, and keeps all of them on every rank"),
        (stage in (1, 2) and not wrapper, "gradients are all-reduced in buckets, of which each rank keeps its part"),
        (stage and param == "fp32", "masters are a copy of the fp32 shards"),
        (stage > 1 and config.batch.accumulation > 1, "stages 2 and 3 reduce the gradients of each micro-batch"),
        (stage == 3, "stage 3 keeps up to 1e9 gathered elements, so that a smaller model is gathered once a step"),
        (stage == 3, "stage 3 keeps parameters below 1e5 elements whole on every rank, and prefetches by elements"),
    )  # fmt: skip
    return [note for holds, note in told if holds]


def settings_of(config: RunConfig) -> dict[str, Any]:
    dtypes, stage, on_gpu = config.precision.dtypes, config.zero.stage, config.resources.device is Device.cuda
    zero: dict[str, Any] = {"stage": stage, "contiguous_gradients": True, "overlap_comm": on_gpu}
    for key, tier in (("offload_optimizer", config.offload.optimizer), ("offload_param", config.offload.params)):
        zero |= {key: {"device": "cpu", "pin_memory": on_gpu}} if tier is Tier.HOST else {}
    given: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": config.batch.micro,
        "gradient_accumulation_steps": config.batch.accumulation,
        "gradient_clipping": config.optimizer.clip_norm or 0.0,  # its default is 1.0
        "communication_data_type": dtypes.reduce,
        "data_types": {"grad_accum_dtype": "fp32"},
        # A mean would round 16-bit gradients once more; stage 3 has the mean alone.
        "gradient_allreduce_op": "mean" if stage == 3 else "sum",
        # Its timer would wait for a GPU in each forward.
        **{"steps_per_print": None, "timers": {"throughput": {"enabled": False}}},
        "zero_allow_untested_optimizer": True,
        # DeepSpeedCPUAdam takes 0.94 of the processor time of torch's fused AdamW (20M elements, one thread), and a
        # compiler at its first start.
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }
    if dtypes.param == "fp16":
        given["fp16"] = {"enabled": True, **values_of(scale := config.precision.scale), "loss_scale": scale.static or 0}
    elif dtypes.param == "bf16":
        # Like the others, it skips no step, and keeps no 16-bit gradient that was added to the fp32 sum.
        bf16 = {"bf16": {"enabled": True, "check_grad_overflow": False, "immediate_grad_update": True}}
        given |= bf16 if stage > 0 else {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    return without_unused_norm(config, merged(given, config.engine.native))


def memory_of(model: PeerModel, config: RunConfig) -> PeerMemory | None:
    return deepspeed_bytes.memory_of(model, config, settings_of(config))


def autocast_of(config: RunConfig) -> str | None:
    return deepspeed_bytes.autocast_in(settings_of(config))


def meaning(config: RunConfig) -> RunConfig:
    return computed_as_param(replace(config, zero=replace(config.zero, prefetch=1, reduce_at_boundary=False)))


def build(task: Task) -> DsEngine:
    return DsEngine(task)


class DsEngine:
    """DeepSpeed's engine around the task's model."""

    def __init__(self, task: Task) -> None:
        import torch

        # What DeepSpeed's launcher sets. Without LOCAL_SIZE each backward of a CPU asks numactl how many devices it is.
        places = {"LOCAL_RANK": str(task.device.index or 0), "LOCAL_SIZE": str(torch.distributed.get_world_size())}
        os.environ |= {"DS_ACCELERATOR": task.device.type, **places}
        import deepspeed

        from orchestrator.wings.engines import materialise, torch_optimizer
        from orchestrator.worker.measure import begin_peak
        from zero_runtime.dtypes import TORCH_DTYPE

        begin_peak()
        # A start on a CPU would compile messages in shared memory, which training does not use.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        self._deepspeed, self._torch, self._settings = deepspeed, torch, settings_of(task.config)
        if "compute_grad_norm" not in deepspeed.runtime.zero.config.DeepSpeedZeroConfig.model_fields:
            self._settings["zero_optimization"].pop("compute_grad_norm", None)  # an older version
        self._linear, self._tools, self._states_of = torch.nn.functional.linear, materialise, torch_optimizer.states_of
        self._half = next((TORCH_DTYPE[key] for key in ("bf16", "fp16") if key in self._settings), None)
        frozen = TORCH_DTYPE[task.config.precision.dtypes.param]
        self._model, masters = task.model, self._take_first_values(task, frozen)
        trained = [(name, param) for name, param in self._model.named_parameters() if param.requires_grad]
        self._optimizer = torch_optimizer.optimizer_of(task.config, trained)
        self.module, *_ = deepspeed.initialize(model=task.model, optimizer=self._optimizer, config=self._settings)
        # In 16 bits it made its masters from the rounded weights.
        deepspeed_again.set_masters(deepspeed, trained if self._half else (), masters)
        self.begin_again = deepspeed_again.restorer(deepspeed, self.module, self._optimizer, trained)
        self._share = torch.distributed.get_world_size() if self.module.gradient_average else 1

    def _take_first_values(self, task: Task, frozen: torch.dtype) -> dict[str, torch.Tensor]:
        """Fills the model; `frozen` is the dtype of what is not trained. Returns the first values of what is, by name,
        as they were before they were rounded to 16 bits; at stage 3 this rank's part, and there each parameter is
        partitioned before the next one is made."""
        made, values, ranks = {}, dict[str, Any](), self._torch.distributed
        for name, param in list(task.model.named_parameters()):
            value, trains = task.first_value(name, param), param.requires_grad
            own: Any = self._torch.nn.Parameter(value.to(task.device, self._half if trains else frozen), trains)
            if self._settings["zero_optimization"]["stage"] == 3:
                self._deepspeed.zero.Init(self._torch.nn.ParameterList([own]), config_dict_or_path=self._settings)
                size = own.ds_tensor.numel()
                padding = value.new_zeros(size * ranks.get_world_size() - value.numel())
                value = self._torch.cat([value.flatten(), padding])[size * ranks.get_rank() :][:size].clone()
            made[id(param)], values = own, {**values, **({name: value} if self._half and trains else {})}
        self._tools.replace(task.model, made, task.device)
        return values

    def before_micro_batch(self, *, last: bool) -> None:
        self.module.set_gradient_accumulation_boundary(last)

    def backward(self, loss: torch.Tensor) -> None:
        self.module.backward(loss * self._share, scale_wrt_gas=False)

    def step(self, rates: Rates) -> Updated:
        for group in self._optimizer.param_groups:
            group["lr"] = rates.lr
        scale = float(getattr(self.module.optimizer, "loss_scale", 1.0))
        self.module.step()
        return Updated(self.module.get_global_grad_norm(), not self.module.was_step_applied(), scale)

    def held(self) -> Mapping[str, Sequence[torch.Tensor]]:
        model, zero, optimizer = list(self._model.parameters()), vars(self.module.optimizer), self._optimizer
        masters = [one for group in optimizer.param_groups for one in group["params"]]
        masters = zero.get("fp32_partitioned_groups_flat", masters)  # stage 3 has no groups between two steps
        grads = [getattr(one, key, None) for one in (*model, *masters) for key in ("grad", "grad_accum")]
        grads += [one for parts in zero.get("averaged_gradients", {}).values() for one in parts or ()]
        grads += [zero.get("grad_partitions_flat_buffer"), *zero.get("fp32_groups_gradients_flat", ())]
        weights = [getattr(one, "ds_tensor", one) for one in model]
        weights += [one for one in model if getattr(one, "ds_persist", False)]
        copies = [] if self.module.optimizer is optimizer else masters
        if "torch_autocast" in self._settings:  # its fp32 weights are the masters
            weights, copies = ([one for one in model if one.requires_grad is trained] for trained in (False, True))
        every = {"params": weights, "master": copies, "grads": grads, **self._states_of(optimizer)}
        return {name: self._tools.apart(tensors) for name, tensors in every.items()}

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, param in self._model.named_parameters():
            master = self._deepspeed.utils.safe_get_full_fp32_param(param)
            with self._deepspeed.zero.GatheredParameters([param]):  # of a frozen one at stage 3
                yield name, param.detach().float().clone() if master is None else master

    def close(self) -> None:
        self.module.destroy()
        # What it leaves in the process would reach another engine there.
        self._deepspeed.runtime.torch_autocast.TORCH_AUTOCAST_INITIALIZED = False
        self._torch.nn.functional.linear = self._linear  # zero.Init has put its own in the place
