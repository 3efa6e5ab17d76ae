"""The profile of a measured run: two more steps, what all ranks found in them, and MFU.

[Note: MFU]
MFU (PaLM, arXiv 2204.02311, appendix B) is the model's operations per second as a share of the devices' dense peak.
The operations are counted by kernel and not taken from 6N + 12LHQT, which they equal for a transformer without causal
kernels; see [Note: model operations] in zero_runtime/profile/flops.py. The time is the median of the measured steps,
never of profiled ones. HFU is the same of all operations that ran. A peak is that of a data sheet in conf/hardware; for
other hardware there is none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from orchestrator.config.schema import RunConfig
from orchestrator.launch.rank import RankInfo
from orchestrator.records.record_file import write_json_atomic
from orchestrator.records.run_record import AttemptPaths
from orchestrator.wings.predict.rough_time import dense_peak
from orchestrator.worker.listeners import Listener
from zero_runtime.profile.step_profile import profile_step
from zero_runtime.runtime import ZeroRuntime


class Profile(Listener):
    """Profiles further steps of a run that was measured; they are forgotten, as those of further rounds are."""

    def add_to(self, result: dict[str, Any]) -> None:
        run = self.run
        if not run.measurement.rounds.is_last_attempt:
            return
        run.measurement.read_last_step()
        run.writer.tell("profiling")

        def step() -> None:
            run.runtime.clock.start()
            run.loop.step(run.measurement)
            run.runtime.clock.end().forget()
            run.runtime.reset_ledger()

        result |= profiled(run.config, run.runtime, run.attempt, run.rank, step, result)


def profiled(
    config: RunConfig,
    runtime: ZeroRuntime,
    attempt: AttemptPaths,
    rank: RankInfo,
    step: Callable[[], None],
    result: dict[str, Any],
) -> dict[str, Any]:
    """The part of the result that a profile adds; empty on all ranks but 0, which also writes profile.json.

    step: a whole training step. result: that of the measured steps, of rank 0. A trace that cannot be written leaves
    the profile out and says so.
    """
    own, trouble = _own(runtime, attempt, rank.rank, step)
    ranks = runtime.collectives.gather_objects({"rank": rank.rank, "trouble": trouble, **_brief(own)})
    failed = [f"rank {one['rank']}: {one['trouble']}" for one in ranks if one["trouble"]]
    if failed:
        return {"profile_failed": "; ".join(failed)} if rank.rank == 0 else {}
    highest = max(ranks, key=lambda one: one["peak_bytes"])["rank"]
    shown = runtime.collectives.gather_objects(own if rank.rank == highest else {})[highest]
    if rank.rank != 0:
        return {}
    try:
        write_json_atomic(attempt.profile, {"rank": highest, **shown})
    except OSError as error:
        return {"profile_failed": f"rank 0: {attempt.profile} could not be written: {error}"}
    step_s = result["throughput"]["step_ms"]["median"] / 1e3
    return {"profile": {**_rates(config, result["environment"]["gpu"], ranks, step_s), **_where(shown, ranks, highest)}}


def _own(
    runtime: ZeroRuntime, attempt: AttemptPaths, rank: int, step: Callable[[], None]
) -> tuple[dict[str, Any], str]:
    """The profile of this rank, or why there is none."""
    with contextlib.suppress(OSError):  # without the folder the trace fails, after the steps: all ranks make those
        attempt.traces.mkdir(exist_ok=True)
    try:
        return profile_step(runtime, step, attempt.traces / f"rank{rank}.json.gz"), ""
    except (OSError, ValueError) as error:  # ValueError: of a trace that ends early, as on a full disk
        return {}, f"the trace could not be written: {error}"


def _brief(own: dict[str, Any]) -> dict[str, Any]:
    if not own:
        return {"peak_bytes": 0, "model_flops": 0, "executed_flops": 0}
    return {
        "peak_bytes": own["peak"]["bytes"],
        "model_flops": own["model_flops"],
        "executed_flops": own["executed_flops"],
    }


def _rates(config: RunConfig, gpu: str | None, ranks: list[dict[str, Any]], step_s: float) -> dict[str, Any]:
    """Operations of all ranks, and their shares of peaks. See [Note: MFU]."""
    model, executed = (sum(one[key] for one in ranks) for key in ("model_flops", "executed_flops"))
    peak, source = dense_peak(config, gpu)

    def share(flops: float) -> float | None:
        return None if not peak else flops / step_s / (peak * len(ranks))

    return {
        "model_flops_per_step": model,
        "executed_flops_per_step": executed,
        "model_flops_per_s": model / step_s,
        "peak_flops_per_s": peak,
        "peak_source": source,
        "mfu": share(model),
        "hfu": share(executed),
    }


def _where(shown: dict[str, Any], ranks: list[dict[str, Any]], highest: int) -> dict[str, Any]:
    peak = shown["peak"]
    largest = peak["holders"][0] if peak["holders"] else {}
    return {
        "step_ms": shown["step_ms"],
        "peak_bytes": peak["bytes"],
        "peak_rank": highest,
        "peak_phase": peak["phase"],
        "peak_module": peak["module"],
        "peak_holder": f"{largest.get('component', '')} {largest.get('name', '')}".strip(),
        "peak_holder_bytes": largest.get("bytes", 0),
        "traces": [f"traces/rank{one['rank']}.json.gz" for one in ranks],
    }
