"""TrainingArguments whose `deepspeed=` needs no other package, as a class to inherit from before transformers' own."""

from __future__ import annotations

from typing import Any

from zero_runtime.integrations.trainer_config import as_mapping


class ZeroArguments:
    """Keeps the configuration of `deepspeed=` for ZeroTrainer and hides it from transformers' own integration.

    Inherit from it before transformers.TrainingArguments. `deepspeed`: a dict, a file, or JSON as text; None trains
    with transformers alone.
    """

    deepspeed: Any

    def __post_init__(self) -> None:
        given, self.deepspeed = self.deepspeed, None  # transformers would import the package deepspeed for it
        try:
            if given is not None:
                as_mapping(given)  # a file that is missing or damaged is refused before anything starts
            super().__post_init__()  # type: ignore[misc]  # that of transformers.TrainingArguments
        finally:
            self.deepspeed = given
        if given is not None:
            # Ranks share a GPU among no models: DataParallel is for several GPUs of one process.
            self._n_gpu = min(self._n_gpu, 1)

    @property
    def place_model_on_device(self) -> bool | None:
        """Whether the Trainer moves the full model to the device first: never with `deepspeed`, whose engine moves
        shards."""
        if self.deepspeed:
            return False
        answer: bool | None = super().place_model_on_device  # type: ignore[misc]
        return answer
