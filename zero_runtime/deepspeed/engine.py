"""The engine that initialize returns: DeepSpeed's, on top of a ZeroRuntime. Checkpoints, modes and numbers are here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from zero_runtime.closed import retire
from zero_runtime.deepspeed import engine_checkpoint
from zero_runtime.deepspeed.absent import ABSENT_OF_ENGINE
from zero_runtime.deepspeed.config import DropinConfig
from zero_runtime.deepspeed.engine_loop import EngineLoop
from zero_runtime.deepspeed.engine_optimizer import EngineOptimizer
from zero_runtime.deepspeed.live_engines import add_engine, remove_engine
from zero_runtime.deepspeed.model_folder import save_16bit
from zero_runtime.deepspeed.schedules import Schedule
from zero_runtime.errors import PlanError
from zero_runtime.runtime import ZeroRuntime
from zero_runtime.watch.watch import RankWatch
from zero_runtime.world import own_rank, world_size


@dataclass(frozen=True)
class EngineParts:
    """The objects from which initialize builds an engine, which owns them from then on.

    left_out: parameters that are frozen as long as the engine is in use, because its optimizer does not have them.
    """

    runtime: ZeroRuntime
    optimizer: EngineOptimizer
    schedule: Schedule | None
    config: DropinConfig
    local_rank: int
    watch: RankWatch | None
    loader: DataLoader[Any] | None = None
    left_out: tuple[nn.Parameter, ...] = ()


class NoMonitor:
    """What scripts ask `engine.monitor`: it is off, and events that they write to it are dropped."""

    enabled = False

    def write_events(self, event_list: Sequence[Any], flush: bool = True) -> None:
        """No effect."""


class Engine(EngineLoop):
    """Trains `module`; attributes that it lacks are those of the module (parameters(), state_dict(), generate(), ...).

    The loss passed to `backward` is this rank's mean over its micro-batch: the engine divides it by the number of
    micro-batches per step and by `dp_world_size`. Call `step` after every micro-batch; it updates the parameters at the
    last one of a step.
    """

    def __init__(self, parts: EngineParts) -> None:
        self.module: nn.Module = parts.runtime.model
        self.runtime = parts.runtime
        self.optimizer = parts.optimizer
        self.lr_scheduler = parts.schedule
        self.config = parts.config
        self.device: torch.device = parts.runtime.device
        self.global_rank, self.local_rank, self.world_size = own_rank(), parts.local_rank, world_size()
        self._watch = parts.watch
        self._left_out = parts.left_out
        self.training_dataloader = parts.loader
        self.monitor = NoMonitor()
        super().__init__()
        add_engine(self)

    def __getattr__(self, name: str) -> Any:
        if name in ABSENT_OF_ENGINE:
            raise AttributeError(f"engine.{name}: {ABSENT_OF_ENGINE[name]}")
        module = self.__dict__.get("module")
        for owner in (self, module):
            if hasattr(type(owner), name):  # a property raised AttributeError: raise its own error
                return object.__getattribute__(owner, name)
        try:
            return getattr(module, name)
        except AttributeError as error:
            raise AttributeError(
                f"engine.{name}: neither the engine nor its module ({type(module).__name__}) has it"
            ) from error

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The module's `generate`, on every rank; prompts and lengths may differ. `synced_gpus` is not needed."""
        return self.runtime.generate(*args, **kwargs)

    # ---- checkpoints ---------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save into `save_dir` (in its folder `tag` if given) in this runtime's format. Every rank calls it alike.

        `client_state`: numbers, texts, True, False, None, tensors, and lists, tuples and dicts of them, which
        load_checkpoint returns as they were, tensors on the CPU; PlanError, which names the place, for others, as for a
        schedule whose state has others. `save_latest` has no effect: no file is needed to find the newest undamaged
        checkpoint. Within an accumulation it saves the end of the last step, with a warning. Returns True, as DeepSpeed
        does.
        """
        engine_checkpoint.save(self, save_dir, tag, client_state or {}, with_frozen=not exclude_frozen_parameters)
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any]]:
        """Load the newest undamaged checkpoint of `load_dir` (under `tag` if given).

        The checkpoint may be the runtime's or DeepSpeed's own, of any world size and stage. Returns its path and the
        client state, or (None, {}) if there is no checkpoint. CheckpointError if all are damaged, or in folders of tags
        and none is given. Newer damaged ones are renamed, so that no save deletes them. Every rank calls it, between
        steps.
        """
        if not load_module_strict:
            raise PlanError("engine.load_checkpoint: expected load_module_strict=True: a model half loaded is none")
        weights_only = load_module_only or not load_optimizer_states
        return engine_checkpoint.load(
            self, load_dir, tag, weights_only=weights_only, with_schedule=load_lr_scheduler_states
        )

    def save_16bit_model(self, save_dir: str | Path, save_filename: str = "model.safetensors") -> bool:
        """Gather the weights, round them to 16 bits and write them into `save_dir`, which may exist.

        Every rank calls it, outside of backwards. Also writes config.json if the module has a Hugging Face `config`.
        Replaces files of an earlier save under the same name. They are safetensors, which from_pretrained reads, also
        for names in .bin (model.safetensors for pytorch_model.bin); a name in .pt or .pth gives one file of torch.save.
        """
        save_16bit(self.runtime, engine_checkpoint.folder_of("save_16bit_model", save_dir), save_filename)
        return True

    save_fp16_model = save_16bit_model  # its older name

    # ---- modes and ends ------------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> Engine:
        """Set the module's training mode; returns the engine."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Set the module's evaluation mode; returns the engine."""
        return self.train(False)

    def empty_partition_cache(self) -> None:
        """No effect: parameters are released after each use."""

    def destroy(self) -> None:
        """Close the runtime and the watch; the process group stays. Every rank calls it. Idempotent.

        The module keeps its trained parameters where they are whole on a rank (stages 0 to 2); at stage 3 a read of one
        raises its name, unless there is one rank. All other methods raise CallOrderError afterwards.
        """
        remove_engine(self)
        try:
            self.runtime.close()
        finally:
            for param in self._left_out:
                param.requires_grad_(True)
            if self._watch is not None:
                self._watch.close()
        told = "expected an engine in use, found one that was destroyed; call engine.module, or initialize another"
        retire(self, told, kept=("destroy",))
