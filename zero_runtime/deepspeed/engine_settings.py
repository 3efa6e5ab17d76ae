"""What scripts ask an engine about its settings, under DeepSpeed's names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from zero_runtime.deepspeed.batch import BatchSizes
from zero_runtime.deepspeed.config import DropinConfig
from zero_runtime.deepspeed.engine_optimizer import EngineOptimizer
from zero_runtime.deepspeed.full_state import full_state
from zero_runtime.deepspeed.schedules import momenta_now, rates_now
from zero_runtime.errors import PlanError
from zero_runtime.runtime import ZeroRuntime


class EngineSettings:
    """The queries of an engine, which its configuration, its runtime and its optimizer's groups answer."""

    config: DropinConfig
    runtime: ZeroRuntime
    optimizer: EngineOptimizer
    world_size: int
    module: nn.Module

    # ---- sizes ---------------------------------------------------------------------------------------------------

    def train_batch_size(self) -> int:
        """Samples per step over all ranks."""
        return self.config.batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per micro-batch on one rank."""
        return self.config.batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per step."""
        return self.config.batch.accumulation

    def get_batch_info(self) -> tuple[int, int, int]:
        """Samples per step over all ranks, samples per micro-batch on one rank, micro-batches per step."""
        return self.config.batch.train, self.config.batch.micro, self.config.batch.accumulation

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of micro-batches per step, and with it what backward divides by. Call it between steps."""
        now = self.config.batch
        accumulation, rest = divmod(train_batch_size, now.micro * self.world_size)
        if rest or accumulation < 1:
            raise PlanError(
                f"engine.set_train_batch_size: expected a multiple of {now.micro} (micro-batch) x {self.world_size} "
                f"(ranks), found {train_batch_size}"
            )
        self.config = replace(self.config, batch=BatchSizes(train_batch_size, now.micro, accumulation))

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Tell the engine the size of the micro-batches that follow; no loader changes."""
        steps = self.config.batch.accumulation
        train = micro_batch_size * steps * self.world_size
        self.config = replace(self.config, batch=BatchSizes(train, micro_batch_size, steps))

    # ---- the configuration ---------------------------------------------------------------------------------------

    def zero_optimization(self) -> bool:
        """Whether any state is sharded."""
        return self.zero_optimization_stage() > 0

    def zero_optimization_stage(self) -> int:
        """0 to 3."""
        return self.config.plan.stage

    def zero_optimization_partition_weights(self) -> bool:
        """Whether parameters are sharded."""
        return not self.config.plan.keeps_full_params

    def fp16_enabled(self) -> bool:
        """Whether the model computes in fp16."""
        return self.config.precision.param == "fp16"

    def bfloat16_enabled(self) -> bool:
        """Whether the model computes in bf16."""
        return self.config.precision.param == "bf16"

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale follows overflows."""
        return self.config.loss_scale.static is None

    def gradient_clipping(self) -> float:
        """The largest global gradient norm; 0 for no clipping."""
        return self.config.clip_norm or 0.0

    @property
    def cur_scale(self) -> float:
        """The loss scale of the next backward; 1 without loss scaling."""
        return self.runtime.scaler.scale

    def loss_scale(self) -> float:
        """The same as `cur_scale`, as a method with DeepSpeed's name."""
        return self.cur_scale

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """True: save_16bit_model gathers the weights at every stage."""
        return True

    @property
    def dp_world_size(self) -> int:
        """Number of ranks with batches of their own: all, or with tensor parallelism one of each group."""
        return self.runtime.collectives.data_world

    @property
    def mp_world_size(self) -> int:
        """Number of consecutive ranks that hold the slices of one model."""
        return self.runtime.collectives.tensor_degree

    def get_data_parallel_rank(self) -> int:
        """The number of this rank's batch among `dp_world_size`: equal on the ranks of a tensor-parallel group."""
        return self.runtime.collectives.data_rank

    def get_tensor_parallel_rank(self) -> int:
        """This rank's place among `mp_world_size`."""
        return self.runtime.collectives.tensor_rank

    def autotp_size(self) -> int:
        """The same as `mp_world_size`, but 0 without tensor parallelism, as DeepSpeed's."""
        return self.mp_world_size if self.mp_world_size > 1 else 0

    def get_lr(self) -> list[float]:
        """The learning rates of the next update, by group."""
        return rates_now(self.optimizer.param_groups)

    def get_mom(self) -> list[Any]:
        """The momentum of each group: its betas, or its momentum."""
        return momenta_now(self.optimizer.param_groups)

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every group for the next update; a schedule sets it anew after each."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def module_state_dict(self) -> dict[str, torch.Tensor]:
        """The module's state dict with full tensors, as CPU copies on every rank. Every rank calls it, between steps.

        Parameters have the dtype that the model computes in.
        """
        return full_state(self.runtime, kept=True)
