"""The ranges of a profiled step: the runtime's phases and the calls of modules, as ranges in the profiler's trace.

[Note: the module of a node]
autograd numbers its nodes in the order in which forward makes them. The numbers at the beginning and the end of each
module's call therefore tell which module made a node, and the node's time in backward is that module's.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from types import TracebackType

import torch
from torch import nn
from torch.profiler import record_function
from torch.utils.hooks import RemovableHandle

from zero_runtime.phase_clock import PhaseClock
from zero_runtime.profile.trace import MODULE, PHASE, STEP

ROOT = "(root)"  # the model itself, which has no name


class StepRanges:
    """Context around one step, which opens a range for the step, each phase of the clock and each call of a module.

    The clock must be started inside. at_mark: called whenever a phase begins or ends. seconds: in the calls of each
    module by the clock `now`, with those of the modules in it.
    """

    now = staticmethod(time.perf_counter)

    def __init__(self, model: nn.Module, clock: PhaseClock, at_mark: Callable[[], None] | None = None) -> None:
        self._model, self._clock, self._at_mark = model, clock, at_mark
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._phases: list[tuple[str, _Range]] = []
        self._calls: list[tuple[str, _Range, float]] = []
        self._handles: list[RemovableHandle] = []
        self._thread = threading.get_ident()
        self._numbers: list[int] = []  # autograd's number at each change of the innermost module
        self._names: list[str | None] = []  # the innermost module from that number on
        self._step: _Range | None = None

    @property
    def phase(self) -> str:
        """The innermost phase; empty outside of all."""
        return self._phases[-1][0] if self._phases else ""

    @property
    def module(self) -> str | None:
        """The innermost module that runs its forward; None outside of all."""
        return self._calls[-1][0] if self._calls else None

    def module_of(self, number: int) -> str | None:
        """The module whose forward made autograd's node of this number; None for one made outside of all modules."""
        place = bisect_right(self._numbers, number) - 1
        return self._names[place] if place >= 0 else None

    def __enter__(self) -> StepRanges:
        for name, module in self._model.named_modules():
            self._handles.append(module.register_forward_pre_hook(self._opening(name or ROOT)))
            # Also if the forward raises: a recomputation ends with an exception once it has all it needs.
            self._handles.append(module.register_forward_hook(self._close_call, always_call=True))
        self._clock.listen(self._on_mark)
        self._step = _Range(STEP)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._on_mark(0, "")
        assert self._step is not None
        self._step.close()
        self._clock.listen(None)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _on_mark(self, depth: int, phase: str) -> None:
        while len(self._phases) > depth:
            self._phases.pop()[1].close()
        if len(self._phases) < depth:
            self._phases.append((phase, _Range(f"{PHASE}{phase}")))
        if self._at_mark is not None:
            self._at_mark()

    def _opening(self, name: str) -> Callable[..., None]:
        def open_call(*_: object) -> None:
            self._calls.append((name, _Range(f"{MODULE}{name}"), self.now()))
            self._note()

        return open_call

    def _close_call(self, *_: object) -> None:
        name, opened, begun = self._calls.pop()
        self.seconds[name] += self.now() - begun
        opened.close()
        self._note()

    def _note(self) -> None:
        if threading.get_ident() == self._thread:  # each thread of autograd has numbers of its own
            self._numbers.append(torch.autograd._get_sequence_nr())
            self._names.append(self.module)


class _Range:
    """An open range of the profiler's trace, and of nvtx where this process uses CUDA, for NVIDIA's Nsight Systems. Its
    ranges are not those of a thread: backward runs in another one than forward."""

    def __init__(self, name: str) -> None:
        self._record = record_function(name)
        self._record.__enter__()
        self._nvtx = torch.cuda.nvtx.range_start(name) if torch.cuda.is_initialized() else None

    def close(self) -> None:
        if self._nvtx is not None:
            torch.cuda.nvtx.range_end(self._nvtx)
        self._record.__exit__(None, None, None)
