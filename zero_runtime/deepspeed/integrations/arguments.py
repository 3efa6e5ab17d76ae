"""TrainingArguments whose `deepspeed=` needs no other package, as a class to inherit from before transformers' own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from zero_runtime.deepspeed.integrations.trainer_config import as_mapping
from zero_runtime.errors import PlanError


class ZeroArguments:
    """Keeps the configuration of `deepspeed=` for ZeroTrainer and hides it from transformers' own integration.

    Inherit from it before transformers.TrainingArguments. `deepspeed`: a dict, a file, or JSON as text; None trains
    with transformers alone.
    """

    if TYPE_CHECKING:  # fields of transformers.TrainingArguments, whose own types HfArgumentParser reads
        deepspeed: Any
        use_cpu: bool
        _n_gpu: int

    def __post_init__(self) -> None:
        given, self.deepspeed = self.deepspeed, None  # transformers would import the package deepspeed for it
        try:
            if given is not None:
                as_mapping(given)  # a file that is missing or damaged is refused before anything starts
                self._take_device()
            super().__post_init__()  # type: ignore[misc]  # that of transformers.TrainingArguments
        finally:
            self.deepspeed = given
        if given is not None:
            # Ranks share a GPU among no models: DataParallel is for several GPUs of one process.
            self._n_gpu = min(self._n_gpu, 1)

    def _take_device(self) -> None:
        """On a machine without GPUs, ranks on the CPU: accelerate starts a world of CPUs for nothing else."""
        if self.use_cpu and torch.cuda.is_available():
            raise PlanError(
                "TrainingArguments, with deepspeed=: found use_cpu=True and a GPU, which the engine would use; start "
                "with an empty CUDA_VISIBLE_DEVICES (`zlab launch --device cpu` sets it)"
            )
        self.use_cpu = not torch.cuda.is_available()

    @property
    def place_model_on_device(self) -> bool | None:
        """Whether the Trainer moves the full model to the device first: never with `deepspeed`, whose engine moves
        shards."""
        if self.deepspeed:
            return False
        answer: bool | None = super().place_model_on_device  # type: ignore[misc]
        return answer
