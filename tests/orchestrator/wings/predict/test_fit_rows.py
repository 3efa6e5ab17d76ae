"""Rows of `zlab fit`: the largest micro-batch by device and host memory, and which rows another row makes needless."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from orchestrator.compose import arguments, compose
from orchestrator.config.schema import Device, LossKind, RunConfig
from orchestrator.machine.hardware import Hardware
from orchestrator.planning.points import checked_points
from orchestrator.planning.rules.scene import Scene
from orchestrator.wings.predict import fit_rows as fit
from orchestrator.wings.predict.fit_rows import Fit
from orchestrator.wings.predict.moments import Met
from orchestrator.wings.predict.step import ConfigMemory
from orchestrator.wings.predict.target import Target
from zero_runtime.activations.rule import RecomputeKind
from zero_runtime.offload_plan import OffloadBytes
from zero_runtime.plan import ZeroPlan
from zero_runtime.predict.memory.counted_unit import CountRules
from zero_runtime.predict.memory.device_overhead import DeviceOverhead
from zero_runtime.predict.memory.outside_step import MomentBytes
from zero_runtime.predict.memory.step_memory import Peak

EACH = 10  # bytes of each sequence of a micro-batch
HIGHEST = 8


@dataclass(frozen=True)
class Linear(ConfigMemory):
    """A stand-in for the counted memory: EACH bytes for each sequence, up to HIGHEST sequences."""

    host: int = 0
    host_each: int = 0  # offloaded activations of a sequence

    def peak(self, micro: int) -> Peak | None:
        if not 1 <= micro <= HIGHEST:
            return None
        return Peak(EACH * micro, {}, EACH * micro, 0, 0, inputs=0, buffers=0, when="in the forward")

    def largest(self, limit_bytes: int) -> int:
        return max(min(limit_bytes // EACH, HIGHEST), 0)

    @property
    def highest_traced(self) -> int:
        return HIGHEST

    def away(self, *, stepped: bool = True) -> OffloadBytes:
        return OffloadBytes(optimizer=self.host)

    def host_bytes(self, micro: int) -> int:
        return self.host + self.host_each * micro

    def sent_bytes(self) -> int:
        return 7


@pytest.fixture(scope="module")
def config() -> RunConfig:
    line = "zero=stage1 precision=fp32 resources.device=cpu resources.ranks=2"
    found, problems = checked_points(compose.compose(arguments.split(line.split())), Scene(Hardware(4, "cpu")))
    assert problems == []
    return found[0].config


RULES = CountRules(ZeroPlan.from_stage(0), 1, 1, 1, 8.0, by_messages=False)


def gpu(device_bytes: int, host_bytes: int | None = 100) -> Target:
    return Target(Device.cuda, device_bytes, 1, host_bytes, ranks_per_node=4)


def row(config: RunConfig, target: Target, *, host: int = 0, overhead: tuple[int, int] = (0, 0)) -> Fit:
    found = fit.fit_of("row", (), Linear(config, [], RULES, (), host), target, DeviceOverhead(1, *overhead))
    assert found is not None
    return found


def test_the_micro_batch_fits_with_the_most_that_libraries_take_and_may_fit_with_the_least(config: RunConfig) -> None:
    one = row(config, gpu(65), overhead=(15, 30))
    assert (one.micro, one.most_micro, one.capped) == (3, 5, False)
    assert one.used_bytes == (45, 60)
    assert one.binds == fit.BLOCKS
    assert one.reason == ""


def test_a_row_that_fits_all_that_was_traced_says_that_there_may_be_more(config: RunConfig) -> None:
    one = row(config, gpu(1000))
    assert (one.micro, one.capped) == (HIGHEST, True)


def test_a_row_that_does_not_fit_names_the_bytes_and_the_largest_part(config: RunConfig) -> None:
    one = row(config, gpu(9))
    assert (one.micro, one.peak.total) == (0, EACH)
    assert one.reason == "micro-batch 1 uses up to 10 B of 9 B, most of it blocks (10 B)"


def test_offloaded_bytes_of_all_ranks_of_a_node_must_fit_into_its_host_memory(config: RunConfig) -> None:
    assert row(config, gpu(50), host=25).micro == 5  # 4 ranks x 25 B = 100 B
    one = row(config, gpu(50), host=26)
    assert (one.micro, one.most_micro, one.host_lacks) == (0, 0, True)
    assert one.reason == "keeps 4 x 26 B = 104 B in a node's host memory of 100 B"
    assert row(config, gpu(50, host_bytes=None), host=26).micro == 5  # not known, not compared


@pytest.mark.parametrize(("each", "micro"), [(4, 5), (5, 5), (6, 4), (12, 2), (25, 1), (26, 0)])
def test_offloaded_activations_bound_the_micro_batch_by_host_memory(config: RunConfig, each: int, micro: int) -> None:
    memory = Linear(config, [], RULES, (), 0, each)  # 4 ranks x each x micro, of 100 B
    one = fit.fit_of("row", (), memory, gpu(50))
    assert one is not None
    assert (one.micro, one.host_bytes) == (micro, each * max(micro, 1))


def test_ranks_that_compute_in_host_memory_share_it(config: RunConfig) -> None:
    cpu = Target(Device.cpu, 80, 2, 80, ranks_per_node=2)
    one = row(config, cpu)
    assert (one.limit_bytes, one.micro, one.host_lacks) == (40, 4, False)
    assert row(config, cpu, host=11).micro == 2  # buffers of offload take a part of the same memory


@pytest.mark.parametrize(
    ("moment", "micro", "reason"),
    [
        (MomentBytes("drawing initial values", 60, 25, "a full copy"), 6, ""),
        (
            MomentBytes("drawing initial values", 61, 0, "a full copy"),
            0,
            "drawing initial values uses up to 65 B of 64 B",
        ),
        (
            MomentBytes("saving a state", 0, 26, "a copy"),
            0,
            "saving a state uses 4 x 26 B of a node's host memory of 100 B",
        ),
    ],
)
def test_a_row_fits_only_if_the_moments_outside_of_steps_do(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, moment: MomentBytes, micro: int, reason: str
) -> None:
    monkeypatch.setattr(fit, "met", lambda _memory: Met((moment,)))
    one = row(config, gpu(64), overhead=(4, 4))
    assert one.micro == one.most_micro == micro
    assert one.reason.startswith(reason)
    assert not one.micro or not one.reason


def test_the_copy_of_the_last_save_is_on_the_host_in_all_later_steps(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "met", lambda _memory: Met((), kept=15))
    assert row(config, gpu(50), host=10).micro == 5  # 4 ranks x (10 B + 15 B) = 100 B
    assert row(config, gpu(50), host=11).micro == 0


def variant(config: RunConfig, label: str, micro: int, **changes: object) -> Fit:
    kind: RecomputeKind = "full" if changes.pop("recompute", False) else "none"
    recompute = replace(config.recompute, kind=kind)
    loss = replace(config.loss, kind=LossKind.tiled if changes.pop("tiled", False) else LossKind.full)
    memory = replace(row(config, gpu(50)).memory, config=replace(config, recompute=recompute, loss=loss))
    return replace(row(config, gpu(50)), label=label, micro=micro, memory=memory, **changes)  # type: ignore[arg-type]


def best(*fits: Fit) -> list[str]:
    return [one.label for one in fit.best(fit.order(fits))]


def test_a_row_is_hidden_if_another_fits_as_much_with_no_more_to_do(config: RunConfig) -> None:
    plain = variant(config, "plain", 2)
    assert best(plain, variant(config, "sends", 2, sent_bytes=9)) == ["plain"]
    assert best(plain, variant(config, "offloads", 2, host_bytes=1)) == ["plain"]
    assert best(plain, variant(config, "recomputes", 1, recompute=True)) == ["plain"]
    assert best(variant(config, "tiles", 2, tiled=True), plain) == ["plain"]


def test_a_row_with_more_to_do_is_shown_if_it_fits_more(config: RunConfig) -> None:
    plain, recomputes = variant(config, "plain", 2), variant(config, "recomputes", 3, recompute=True)
    offloads = variant(config, "offloads", 4, host_bytes=1)
    assert best(offloads, recomputes, plain) == ["plain", "recomputes", "offloads"]


def test_of_equal_rows_one_is_shown_and_of_rows_that_do_not_fit_none(config: RunConfig) -> None:
    assert best(variant(config, "one", 2), variant(config, "same", 2)) == ["one"]
    assert best(variant(config, "none", 0)) == []


def test_rows_of_different_models_or_ranks_do_not_hide_each_other(config: RunConfig) -> None:
    small = variant(config, "small", 8, group=("resources.ranks=8",))
    assert best(small, variant(config, "large", 1, group=("resources.ranks=1",))) == ["small", "large"]
