"""Blocks get their components, and the timeline's columns, its peak and the peak's holders follow from them."""

from __future__ import annotations

from zero_runtime.profile.timeline import (
    BlockOwner,
    Sample,
    StartBlock,
    TimedBlock,
    alike,
    blocks_of,
    holders,
    name_blocks,
    timeline_of,
)
from zero_runtime.profile.trace import BACKWARD, COMMUNICATION, FORWARD, RECOMPUTE, Context, MemoryEvent

IN_FORWARD = Context("forward", "mlp", FORWARD)
IN_BACKWARD = Context("backward", "mlp", BACKWARD)
RECOMPUTING = Context("backward", "mlp", RECOMPUTE)
WEIGHTS = BlockOwner("parameters", "blocks.0")


def event(at_us: float, address: int, nbytes: int, context: Context = IN_FORWARD) -> MemoryEvent:
    return MemoryEvent(at_us, address, nbytes, 0, context)


def named(
    *events: MemoryEvent, samples: tuple[Sample, ...] = (), start: tuple[StartBlock, ...] = ()
) -> list[TimedBlock]:
    """The blocks of a step from 0 to 100 us, whose forward takes its first 50."""
    blocks = blocks_of(start, list(events), 0.0)
    name_blocks(blocks, samples, [(0.0, 50.0)])
    return blocks


def components(blocks: list[TimedBlock]) -> list[str]:
    return [block.held.component for block in blocks if block.held]


def test_what_outlives_the_forward_is_an_activation_and_all_else_is_temporary() -> None:
    blocks = named(event(10, 1, 8), event(20, 2, 8), event(30, 1, -8), event(60, 3, 8, IN_BACKWARD), event(70, 2, -8))
    assert components(blocks) == ["temporary", "activations", "temporary"]
    assert [(block.born_us, block.died_us) for block in blocks] == [(10, 30), (20, 70), (60, None)]


def test_what_a_recomputation_makes_is_an_activation_if_the_backward_after_it_releases_it() -> None:
    kept = named(event(60, 1, 8, RECOMPUTING), event(80, 1, -8, IN_BACKWARD))
    dropped = named(event(60, 1, 8, RECOMPUTING), event(61, 1, -8, RECOMPUTING))
    assert components(kept) + components(dropped) == ["activations", "temporary"]


def test_a_tensor_of_the_runtime_names_the_block_that_lives_at_its_address_while_it_is_seen() -> None:
    samples = (Sample(15.0, {1: WEIGHTS}), Sample(55.0, {1: BlockOwner("gradients", "blocks.0")}))
    blocks = named(event(10, 1, 8), event(20, 1, -8), event(30, 1, 8), event(70, 1, -8), samples=samples)
    assert components(blocks) == ["parameters", "gradients"]
    assert components(named(event(56, 1, 8, IN_BACKWARD), samples=samples)) == ["temporary"], "it came afterwards"


def test_the_result_of_a_reduction_is_a_gradient_although_it_was_a_message_first() -> None:
    samples = (Sample(15.0, {1: BlockOwner("messages", "b")}), Sample(25.0, {1: BlockOwner("gradients", "b")}))
    assert components(named(event(10, 1, 8), samples=samples)) == ["gradients"]
    assert components(named(event(10, 1, 8), event(20, 1, -8), samples=samples)) == ["messages"]


def test_buffers_of_a_collective_are_messages() -> None:
    assert components(named(event(10, 1, 8, Context(COMMUNICATION, "mlp", FORWARD)))) == ["messages"]


def test_a_block_whose_release_was_not_seen_ends_when_its_address_is_given_out_again() -> None:
    blocks = named(event(10, 5, 8), start=(StartBlock(5, 100, WEIGHTS), StartBlock(6, 50, WEIGHTS)))
    assert [(block.nbytes, block.died_us) for block in blocks] == [(100, 10), (50, None), (8, None)]
    assert named(event(10, 9, -8)) == [], "a release without an allocation"


def test_the_columns_keep_the_highest_moment_of_each_part_of_the_step() -> None:
    start = (StartBlock(5, 100, WEIGHTS),)
    blocks = named(event(10, 1, 8), event(12, 1, -8), event(60, 2, 30, IN_BACKWARD), event(61, 2, -30), start=start)
    line = timeline_of(blocks, 0.0, 100.0, columns=4, unseen=1)
    assert [at for at, _ in line.columns] == [10, 25, 60, 75]
    assert [sum(held.values()) for _, held in line.columns] == [109, 101, 131, 101]
    assert [held["other"] for _, held in line.columns] == [1] * 4
    assert (line.peak.at_us, line.peak.nbytes, line.peak.context) == (60, 131, IN_BACKWARD)
    assert sorted(block.nbytes for block in line.at_peak) == [30, 100]


def test_holders_join_the_same_module_of_all_layers() -> None:
    blocks = [
        TimedBlock(at, size, 0.0, IN_FORWARD, held=BlockOwner("activations", f"h.{at}.mlp"))
        for at, size in ((0, 3), (11, 5))
    ]
    blocks.append(TimedBlock(9, 7, 0.0, IN_FORWARD, held=WEIGHTS))
    assert holders(blocks, 1) == [
        {"component": "activations", "name": "h.*.mlp", "bytes": 8, "tensors": 2, "largest_bytes": 5}
    ]
    assert alike("h.3.conv1d.2") == "h.*.conv1d.*"
