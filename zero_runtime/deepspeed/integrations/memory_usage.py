"""A callback of transformers' Trainer that logs the memory of a device while it trains."""

from __future__ import annotations

from typing import Any, NamedTuple

import transformers

from zero_runtime.deepspeed.accelerator import get_accelerator
from zero_runtime.deepspeed.runtime.utils import memory_text
from zero_runtime.deepspeed.utils.logging import log_dist


class MemoryUsage(NamedTuple):
    """Bytes of this rank's device after a step; step 0: when the model is loaded. On a CPU both are the process's."""

    step: int
    allocated: int
    reserved: int


class MemoryUsageCallback(transformers.TrainerCallback):
    """Logs allocated and reserved memory when the model is loaded, after every so many steps, and at the end. Rank 0
    logs; each rank keeps its own in `history`. For any Trainer: `Trainer(..., callbacks=[MemoryUsageCallback()])`."""

    def __init__(self, print_every_n_steps: int = 10) -> None:
        every = print_every_n_steps
        if type(every) is not int or every < 1:
            raise ValueError(f"print_every_n_steps: expected a whole number from 1, found {every!r}; use 10")
        self.print_every_n_steps = every
        self.history: list[MemoryUsage] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Before the first step, also of a run that resumes."""
        self._note(int(state.global_step), "loaded")

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """After an optimizer step."""
        if state.global_step % self.print_every_n_steps == 0:
            self._note(int(state.global_step), f"step {state.global_step}")

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """After the last step, unless it was logged already."""
        if self.history and self.history[-1].step != state.global_step:
            self._note(int(state.global_step), f"step {state.global_step}")

    def _note(self, step: int, when: str) -> None:
        device = get_accelerator()
        self.history.append(MemoryUsage(step, device.memory_allocated(), device.memory_reserved()))
        log_dist(f"memory, {when}: {memory_text()}", ranks=[0])
