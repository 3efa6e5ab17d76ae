"""run_ranks: runs a function on every rank of a gloo world. Each rank is a process forked from a warm fork server."""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any

from harness.patience import HANG_S

COMM = "ZERO_LAB_TEST_COMM"  # an environment variable: over what CPU ranks of tests talk, see zero_runtime.world

# Modules that a rank would otherwise spend most of its time importing. orchestrator.workloads.models comes before
# transformers, because it sets transformers to offline mode. An architecture that is missing here is imported again in
# each test that builds it. Names are found from the repository's root, where the fork server is started.
PRELOAD = [
    *("torch", "torch.distributed", "numpy", "pytest", "safetensors.torch"),
    *("orchestrator.workloads.models", "orchestrator.worker.train", "zero_runtime.checkpoint.background"),
    *("transformers.models.llama.modeling_llama", "transformers.models.gpt2.modeling_gpt2"),
    *("transformers.models.t5.modeling_t5", "tests.harness.warm"),
]
ROOT = Path(__file__).resolve().parents[2]
RANK_THREADS = 1
GLOO_LOOP, LOWER_BY = "gloo_tcp_loop", 10
_fault: str | None = None  # the fault of harness.faults for ranks that are started from now on


def set_fault(name: str | None) -> None:
    """Inject this fault into the runtime of ranks of later calls; None: no fault."""
    global _fault
    _fault = name


def prepare_fork_server() -> None:
    """Must run before the first `run_ranks`; the server inherits this environment."""
    os.environ.setdefault("OMP_NUM_THREADS", str(RANK_THREADS))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    mp.set_forkserver_preload(PRELOAD)


def fork_context() -> mp.context.ForkServerContext:
    """The context whose processes are forked from the fork server, which is started in the repository's root if it is
    not running yet: a test may have changed the folder."""
    prepare_fork_server()
    here = os.getcwd()
    os.chdir(ROOT)
    try:
        forkserver.ensure_running()
    finally:
        os.chdir(here)
    return mp.get_context("forkserver")


def run_ranks(function: Callable[..., Any], world: int, *args: Any, timeout_s: float = HANG_S) -> list[Any]:
    """Run `function(*args)` on each of `world` ranks with a process group. Returns the results by rank.

    World 0: see run_alone. `function` and `args` must be picklable. If a rank fails, or the timeout passes, the call
    raises AssertionError with the traceback of every rank that failed.
    """
    context = fork_context()
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_rank_main, args=(function, args, rank, world, folder, _fault), daemon=True)
            for rank in range(max(world, 1))
        ]
        for process in processes:
            process.start()
        try:
            _await_all(processes, time.monotonic() + timeout_s)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return _collect(folder, [process.exitcode for process in processes])


def run_alone(function: Callable[..., Any], *args: Any, timeout_s: float = HANG_S) -> Any:
    """Run `function(*args)` in a separate forked process without a process group: the function may create one."""
    return run_ranks(function, 0, *args, timeout_s=timeout_s)[0]


def _await_all(processes: list[Any], deadline: float) -> None:
    """Return when all have ended, or one second after one has failed, because its peers would wait for it forever."""
    running = {process.sentinel: process for process in processes}
    while running and (left_s := deadline - time.monotonic()) > 0:
        for sentinel in connection.wait(list(running), left_s):
            ended = running.pop(sentinel)
            ended.join()
            if ended.exitcode != 0:
                deadline = min(deadline, time.monotonic() + 1.0)


def _let_senders_first() -> None:
    """Lower the priority of gloo's own threads: while a sender holds a lock, they ask for it without a pause, and on
    few cores they do so on the core that the sender waits for."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread that has ended
            if (task / "comm").read_text().strip() == GLOO_LOOP:
                os.setpriority(os.PRIO_PROCESS, int(task.name), own + LOWER_BY)  # above 19 counts as 19


def _collect(folder: str, exit_codes: list[int | None]) -> list[Any]:
    results, troubles = [], []
    for rank, exit_code in enumerate(exit_codes):
        path = Path(folder, f"rank{rank}.pkl")
        if not path.exists():
            troubles.append(f"--- rank {rank}: ended without a result, with exit code {exit_code} (-9: out of time)")
            continue
        ok, value = pickle.loads(path.read_bytes())
        results.append(value)
        if not ok:
            troubles.append(f"--- rank {rank}:\n{value}")
    if troubles:
        raise AssertionError("\n".join(troubles))
    return results


def _rank_main(
    function: Callable[..., Any], args: tuple[Any, ...], rank: int, world: int, folder: str, fault: str | None
) -> None:
    import torch
    import torch.distributed as dist

    from zero_runtime.world import cpu_backend

    # A garbage collection would visit all objects of the libraries, and so copy the pages shared with the fork server.
    # (A census of live tensors runs a collection before it counts.)
    gc.freeze()
    torch.set_num_threads(RANK_THREADS)
    if hasattr(os, "SCHED_BATCH"):
        # A waking thread then preempts no other thread. Otherwise a thread of gloo would preempt the holder of a lock
        # that it needs, in the middle of a send, and retry to take that lock until its time slice ends.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    if fault is not None:
        from harness import faults

        faults.apply(fault)
    if world:
        store = dist.FileStore(str(Path(folder, "store")), world)
        backend = cpu_backend(os.environ.get(COMM, "auto"), world)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=HANG_S))
        dist.barrier()  # otherwise a rank that sends nothing could exit while another still connects
        _let_senders_first()
    try:
        outcome: tuple[bool, Any] = (True, function(*args))
    except BaseException:
        outcome = (False, traceback.format_exc())
    part = Path(folder, f"rank{rank}.part")
    part.write_bytes(pickle.dumps(outcome))
    part.rename(Path(folder, f"rank{rank}.pkl"))
    if not outcome[0]:
        os._exit(1)
    if dist.is_initialized():
        dist.destroy_process_group()
