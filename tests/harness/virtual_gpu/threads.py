"""Helper threads that take turns, as early or as late as possible, and whose waits and signals order what they do.

[Note: turns]
The product's helper threads are real threads, each with its own current device and streams, but only one thread runs at
a time: it keeps the turn until it waits. `late`: a helper gets the turn only when the main thread waits for something
that no helper has done yet. Otherwise helpers run as soon as there is something for them to do. autograd's thread has
the main thread's turn, since either always waits for the other.

`install` puts the classes of this file in place of those of `threading` and `concurrent.futures` in the product's
modules. A deadlock is an error with the names of the threads that wait.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent import futures
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

from harness.virtual_gpu.machine import Actor, Clock, Machine
from zero_runtime import wings

Ready = Callable[[], bool]


def _always() -> bool:
    return True


@dataclass
class Task:
    """A thread that takes turns. gate: released when it gets the turn; ready: whether it could continue."""

    actor: Actor
    name: str
    gate: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    ready: Ready = _always
    ended: bool = False


class Turns:
    """Which thread runs. See [Note: turns]."""

    def __init__(self, machine: Machine, enter: Callable[[], Any]) -> None:
        """enter: a context in which every helper thread runs."""
        self.machine = machine
        self.late = False
        self._enter = enter
        self._main = Task(("thread", 0), "main")
        self._helpers: list[Task] = []
        self._running = self._main
        self._made = 0

    @property
    def actor(self) -> Actor:
        """The thread that runs."""
        return self._running.actor

    def spawn(self, name: str, run: Callable[[], None]) -> Task:
        """Start a helper thread. What this thread did so far happens before all that the helper does."""
        self._made += 1
        task = Task(("thread", self._made), name)
        self.machine.names[task.actor] = f"thread {name}"
        self.machine.clocks[task.actor].join(self.machine.clocks[self.actor])
        self._helpers.append(task)
        threading.Thread(target=self._run, args=(task, run), name=name, daemon=True).start()
        self.offer()
        return task

    def _run(self, task: Task, run: Callable[[], None]) -> None:
        task.gate.acquire()
        try:
            with self._enter():
                run()
        finally:
            task.ended = True
            self._helpers.remove(task)
            self._give(self._pick())

    def offer(self) -> None:
        """Something has happened that a helper may wait for: without `late` it runs now."""
        if not self.late:
            self._switch(_always)

    def wait_until(self, ready: Ready) -> None:
        """Give the turn away until `ready`."""
        if not ready():
            self._switch(ready)

    def _switch(self, ready: Ready) -> None:
        me = self._running
        me.ready = ready
        chosen = self._pick()
        if chosen is not me:
            self._give(chosen)
            me.gate.acquire()
        me.ready = _always

    def _give(self, task: Task) -> None:
        self._running = task
        task.gate.release()

    def _pick(self) -> Task:
        order = [self._main, *self._helpers] if self.late else [*self._helpers, self._main]
        for task in order:
            if not task.ended and task.ready():
                return task
        raise RuntimeError(f"deadlock: {', '.join(task.name for task in order)} wait for each other")


class _Signal:
    """What a thread that signals has done, for those that see the signal."""

    def __init__(self, turns: Turns) -> None:
        self.turns, self.clock = turns, Clock()

    def send(self) -> None:
        self.clock.join(self.turns.machine.now(self.turns.actor))

    def receive(self) -> None:
        self.turns.machine.follow(self.turns.actor, self.clock, "thread waits")


def stand_ins(turns: Turns) -> dict[str, Any]:
    """The classes and functions that `install` puts into modules, by the names of the originals."""

    class Future(futures.Future):  # type: ignore[type-arg]
        def __init__(self) -> None:
            super().__init__()
            self._signal = _Signal(turns)

        def set_result(self, result: Any) -> None:
            self._signal.send()
            super().set_result(result)
            turns.offer()

        def set_exception(self, exception: BaseException | None) -> None:
            self._signal.send()
            super().set_exception(exception)
            turns.offer()

        def done(self) -> bool:
            found = super().done()
            if found:
                self._signal.receive()
            return found

        def result(self, timeout: float | None = None) -> Any:
            self.wait_for()
            return super().result(timeout)

        def exception(self, timeout: float | None = None) -> BaseException | None:
            self.wait_for()
            return super().exception(timeout)

        def wait_for(self) -> None:
            turns.wait_until(super().done)
            self._signal.receive()

    def wait(awaited: Iterable[Any], timeout: float | None = None, return_when: str = futures.ALL_COMPLETED) -> Any:
        kept = list(awaited)
        for future in kept:
            future.wait_for()
        return futures.wait(kept)

    return {
        "Future": Future,
        "wait": wait,
        "Event": lambda: Event(turns),
        "Lock": lambda: Lock(turns),
        "Thread": lambda *args, **kwargs: Thread(turns, *args, **kwargs),
        "ThreadPoolExecutor": lambda *args, **kwargs: Pool(turns, Future, *args, **kwargs),
    }


class Event:
    """threading.Event."""

    def __init__(self, turns: Turns) -> None:
        self._turns, self._signal, self._set = turns, _Signal(turns), False

    def set(self) -> None:
        self._signal.send()
        self._set = True
        self._turns.offer()

    def clear(self) -> None:
        self._set = False

    def is_set(self) -> bool:
        if self._set:
            self._signal.receive()
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        self._turns.wait_until(lambda: self._set)
        self._signal.receive()
        return True


class Lock:
    """threading.Lock."""

    def __init__(self, turns: Turns) -> None:
        self._turns, self._signal, self._held = turns, _Signal(turns), False

    def acquire(self) -> bool:
        self._turns.wait_until(lambda: not self._held)
        self._held = True
        self._signal.receive()
        return True

    def release(self) -> None:
        self._signal.send()
        self._held = False

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Thread:
    """threading.Thread."""

    def __init__(
        self,
        turns: Turns,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str = "helper",
        args: Iterable[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self._turns, self._signal, self.name = turns, _Signal(turns), name
        self._target, self._args, self._kwargs = target, tuple(args), kwargs or {}
        self._task: Task | None = None

    def start(self) -> None:
        self._task = self._turns.spawn(self.name, self._run)

    def _run(self) -> None:
        if self._target is not None:
            self._target(*self._args, **self._kwargs)
        self._signal.send()

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.ended

    def join(self, timeout: float | None = None) -> None:
        self._turns.wait_until(lambda: not self.is_alive())
        self._signal.receive()


class Pool:
    """concurrent.futures.ThreadPoolExecutor, with one thread however many are asked for."""

    def __init__(
        self,
        turns: Turns,
        future: type,
        max_workers: int | None = None,
        thread_name_prefix: str = "pool",
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
    ) -> None:
        self._turns, self._future = turns, future
        self._name, self._begin = thread_name_prefix, (initializer, initargs)
        self._jobs: deque[tuple[Any, Clock, Callable[[], Any]]] = deque()
        self._ends = False
        self._task: Task | None = None

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        future = self._future()
        before = self._turns.machine.now(self._turns.actor)
        self._jobs.append((future, before, lambda: function(*args, **kwargs)))
        if self._task is None:
            self._task = self._turns.spawn(self._name, self._work)
        else:
            self._turns.offer()
        return future

    def _work(self) -> None:
        initializer, arguments = self._begin
        if initializer is not None:
            initializer(*arguments)
        while True:
            self._turns.wait_until(lambda: bool(self._jobs) or self._ends)
            if not self._jobs:
                return
            future, before, job = self._jobs.popleft()
            self._turns.machine.clocks[self._turns.actor].join(before)
            try:
                result = job()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._ends = True
        if self._task is not None:
            task = self._task
            self._turns.wait_until(lambda: task.ended)
            self._turns.machine.follow(self._turns.actor, self._turns.machine.now(task.actor), "thread waits")

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def install(turns: Turns, package: str) -> None:
    """Replace the originals in all modules of a package that are imported, and in the wings that start threads."""
    for place in (wings.OPEN_TIER, wings.ACTIVATIONS_ON_HOST):  # otherwise a runtime would import them afterwards
        wings.load(place)
    ours = stand_ins(turns)
    originals = {
        id(getattr(module, name)): name for name in ours for module in (threading, futures) if hasattr(module, name)
    }
    shims = {id(module): SimpleNamespace(**{**vars(module), **ours}) for module in (threading, futures)}
    for name, module in list(sys.modules.items()):
        if (name == package or name.startswith(f"{package}.")) and isinstance(module, ModuleType):
            for attribute, value in list(vars(module).items()):
                if id(value) in originals:
                    setattr(module, attribute, ours[originals[id(value)]])
                elif id(value) in shims:
                    setattr(module, attribute, shims[id(value)])
