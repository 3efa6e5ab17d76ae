"""Offloaded activations change no bits, leave nothing of the blocks on the device and return one block ahead."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from harness.ranks import run_ranks
from harness.shapes import Adapters, Base, BorrowedInHead, FrozenMiddle, Parallel, Repeated, build_shape, ids_of
from test_recompute import Dropout, Transformer, losses, runtime_of
from torch import nn

from zero_runtime.activations.offload import HostMemory
from zero_runtime.activations.on_host import BlocksOnHost
from zero_runtime.activations.recompute import Recomputation, RecomputeRule
from zero_runtime.deepspeed import checkpointing
from zero_runtime.errors import PlanError
from zero_runtime.offload.copy_streams import Copies, CopyEvent

STAGES = (0, 1, 2, 3)
KINDS = ("none", "full", "every_nth", "by_operation")
CPU = torch.device("cpu")


class _Late:
    """A copy that has read its source, but fills its target only when `wait` is called."""

    def __init__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._target, self._values = target, source.clone()
        target.fill_(0x55)

    def wait(self) -> None:
        if self._values is not None:
            self._target.copy_(self._values)
            self._values = None

    hold_device = wait


class LateCopies(Copies):
    """Copies between two memories of a CPU that end late, as CUDA copies may: a caller that does not wait reads noise.

    trips: bytes of each copy in order, negative if to the device. left: storages that were copied to the host. host:
    storages that represent host memory. Both are keyed by address and keep their storages alive: a storage that was
    freed could leave its address to another one, which would then be mistaken for it.
    """

    def __init__(self) -> None:
        super().__init__(CPU)
        self.trips: list[int] = []
        self.host: dict[int, torch.UntypedStorage] = {}
        self.left: dict[int, torch.UntypedStorage] = {}

    def on_host(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(numel, dtype=dtype)
        _note(self.host, tensor)
        return tensor

    def to_host(self, target: torch.Tensor, source: torch.Tensor) -> CopyEvent:
        self.trips.append(source.numel())
        _note(self.left, source)
        return self._late(target, source)

    def to_device(self, target: torch.Tensor, source: torch.Tensor, after: Sequence[CopyEvent] = ()) -> CopyEvent:
        self.trips.append(-source.numel())
        for mark in after:
            mark.wait()
        return self._late(target, source)

    def _late(self, target: torch.Tensor, source: torch.Tensor) -> _Late:
        assert target.shape == source.shape
        assert target.untyped_storage()._cdata != source.untyped_storage()._cdata
        late = _Late(target, source)
        _note(self.host, late._values)  # in flight
        return late


def _note(storages: dict[int, torch.UntypedStorage], tensor: torch.Tensor) -> None:
    storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()


class Sliced(nn.Module):
    """Saves slices of one storage, a transposed view, an expanded view, and a tensor that is changed in place after an
    operation with an unused result has saved it. Takes its inputs by keyword.
    """

    def __init__(self) -> None:
        super().__init__()
        self.three = nn.Linear(12, 36)

    def forward(self, *, hidden: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        q, k, v = self.three(hidden).split(12, -1)
        weights = torch.softmax(q @ k.transpose(-1, -2) * scale.expand_as(hidden[..., :1]), -1)
        mixed = weights @ v
        mixed.sin()
        return hidden + mixed.mul_(0.5).cos() * scale


class ByKeyword(Base):
    layer = Sliced

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(hidden=x, scale=torch.full((1,), 0.3))
        return x


def _same_bits(stages: tuple[int, ...]) -> None:
    shapes = (Dropout, ByKeyword, Adapters, FrozenMiddle, BorrowedInHead, Parallel, Repeated)
    for shape, stage in product(shapes, stages):
        wanted = losses(build_shape(shape), stage)
        for kind in KINDS:
            model, copies = build_shape(shape), LateCopies()
            recomputation = Recomputation(model, RecomputeRule(kind, 2, "cpu"), CPU, copies)
            assert losses(model, stage) == wanted, (shape, stage, kind)
            unused = shape is ByKeyword and kind in ("none", "every_nth")
            assert sum(copies.trips) == 0 or unused, "what left came back, once"
            assert copies.left
            recomputation.remove()
            assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    ("world", "stages"),
    [(1, (3,)), *(pytest.param(*one, marks=pytest.mark.full) for one in ((1, (0, 1, 2)), (2, STAGES)))],
)
def test_offloaded_activations_change_no_bits_and_no_collectives(world: int, stages: tuple[int, ...]) -> None:
    run_ranks(_same_bits, world, stages)


def _left() -> None:
    for stage in STAGES:
        model, copies = build_shape(Dropout), LateCopies()
        Recomputation(model, RecomputeRule("none", offload="cpu"), CPU, copies)
        runtime = runtime_of(model, stage)
        loss = model.loss_of(runtime(ids_of(0, 0)))
        assert copies.left
        assert not copies.left.keys() & {
            unit.parameters.unsharded_param.untyped_storage()._cdata for unit in runtime.units
        }
        del loss
        runtime.close()


def test_parameters_are_not_offloaded_with_the_activations() -> None:
    run_ranks(_left, 1)


def _left_on_the_device(kind: str, blocks: int) -> tuple[int, int]:
    """Number of floating-point storages that a forward leaves alive on the device, with offload and without."""
    found = []
    for offload in ("cpu", "none"):
        torch.manual_seed(0)
        model, copies = Base(blocks), LateCopies()
        recomputation = Recomputation(model, RecomputeRule(kind, 2, offload), CPU, copies)
        runtime = runtime_of(model, 3)
        losses_of_one = model.loss_of(runtime(ids_of(0, 0)))  # creates what all steps share
        runtime.backward(losses_of_one / 100)
        del losses_of_one
        gc.collect()
        before = _live_storages(copies)
        loss = model.loss_of(runtime(ids_of(0, 0)))
        found.append(len(_live_storages(copies).keys() - before.keys()))
        del loss, recomputation, before
        runtime.close()
    return found[0], found[1]


def _live_storages(copies: LateCopies) -> dict[int, torch.UntypedStorage]:
    """Floating-point storages on the device by address, kept alive so that no other storage can get their address."""
    gc.collect()
    tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor) and item.is_floating_point()]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return {one: storage for one, storage in storages.items() if storage.nbytes() and one not in copies.host}


def _counts(kind: str) -> list[tuple[int, int]]:
    return [_left_on_the_device(kind, blocks) for blocks in (2, 6)]


@pytest.mark.parametrize("kind", ["full", "by_operation"], ids=["inputs", "products"])  # the id "full" would be a mark
def test_offloaded_blocks_leave_no_activations_on_the_device(kind: str) -> None:
    """Six blocks leave as many storages as two; without offload they leave more."""
    (few, few_kept), (many, many_kept) = run_ranks(_counts, 1, kind)[0]
    assert few == many
    assert many_kept > few_kept


class Watching(Recomputation):
    """Records when blocks begin, in forward and (again, with full recomputation) in backward."""

    def __init__(self, model: nn.Module, copies: LateCopies) -> None:
        for index, block in enumerate(model.blocks):
            forward = block.forward
            block.forward = lambda *args, i=index, run=forward: (copies.trips.append(f"block {i}"), run(*args))[1]
        super().__init__(model, RecomputeRule("full", offload="cpu"), CPU, copies)


def _order() -> list[Any]:
    model, copies = Base(4), LateCopies()
    Watching(model, copies)
    runtime = runtime_of(model, 3, micro_batches=1)
    runtime.backward(model.loss_of(runtime(ids_of(0, 0))) / 100)
    return [trip if isinstance(trip, str) else "away" if trip > 0 else "back" for trip in copies.trips]


def test_each_input_is_fetched_while_the_block_after_it_is_recomputed() -> None:
    forward = [event for index in range(4) for event in ("away", f"block {index}")]
    backward = ["back", "back", "block 3", "back", "block 2", "back", "block 1", "block 0"]
    assert run_ranks(_order, 1)[0] == forward + backward


def _memory() -> tuple[int, int]:
    model, copies = Base(3), LateCopies()
    recomputation = Recomputation(model, RecomputeRule("full", offload="cpu"), CPU, copies)
    runtime, taken = runtime_of(model, 3, micro_batches=1), []
    for step in range(3):
        runtime.backward(model.loss_of(runtime(ids_of(step, 0))) / 100)
        runtime.step(1e-2)
        assert recomputation.memory is not None
        taken.append(recomputation.memory.nbytes)
    with torch.no_grad():
        trips = len(copies.trips)
        runtime(ids_of(0, 0))
        assert len(copies.trips) == trips, "without gradients nothing is kept"
    loss = model.loss_of(runtime(ids_of(9, 0)))
    del loss  # a graph that is freed returns its host buffers
    runtime.backward(model.loss_of(runtime(ids_of(9, 0))) / 100)
    assert recomputation.memory.nbytes == taken[0]
    return taken[0], taken[-1]


def test_host_memory_is_allocated_once_and_reused() -> None:
    first, last = run_ranks(_memory, 1)[0]
    assert first == last > 0


def _retained() -> None:
    for kind in ("none", "full", "by_operation"):
        model = build_shape(Dropout)
        Recomputation(model, RecomputeRule(kind, offload="cpu"), CPU, LateCopies())
        loss = model.loss_of(model(ids_of(0, 0)))
        found = []
        for _ in range(2):
            model.zero_grad()
            loss.backward(retain_graph=True)
            found.append([param.grad.clone() for param in model.parameters()])
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True)), kind


def test_activations_of_a_retained_graph_are_fetched_again() -> None:
    run_ranks(_retained, 1)


def _transformers(kind: str) -> None:
    llama = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    llama |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    gpt2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    config = {"llama": llama, "gpt2": gpt2}[kind]
    wanted = losses(Transformer(kind, config), 3)
    for rule in KINDS:
        model = Transformer(kind, config)
        Recomputation(model, RecomputeRule(rule, offload="cpu"), CPU, LateCopies())
        assert losses(model, 3) == wanted, rule


@pytest.mark.parametrize("kind", ["llama", pytest.param("gpt2", marks=pytest.mark.full)])
def test_transformers_models_have_the_same_losses_with_offloaded_activations(kind: str) -> None:
    run_ranks(_transformers, 2, kind)


def test_nothing_is_copied_if_the_device_is_a_cpu() -> None:
    model = build_shape(Dropout)
    assert Recomputation(model, RecomputeRule("full", offload="cpu")).memory is None
    assert Recomputation(build_shape(Dropout), RecomputeRule("none", offload="cpu")).blocks == []


def test_host_buffers_are_reused_and_waste_at_most_an_eighth() -> None:
    memory = HostMemory(LateCopies(), CPU)
    for nbytes in (1, 63, 64, 65, 1000, 4097, 10**6 + 3):
        room = memory.take(nbytes)
        assert nbytes <= room.numel() <= max(nbytes * 9 / 8, nbytes + 63)
        memory.give_back(room)
        assert memory.take(nbytes) is room
    memory.close()
    assert memory.nbytes == 0


def test_invalid_offload_settings_are_refused() -> None:
    with pytest.raises(PlanError, match=r"recompute\.offload must be one of none, cpu, found nvme"):
        RecomputeRule("full", offload="nvme")
    with pytest.raises(PlanError, match=r"offload=cpu: expected a model with an nn\.ModuleList"):
        Recomputation(nn.Linear(2, 2), RecomputeRule("none", offload="cpu"))


def test_a_storage_is_fetched_in_the_order_of_saving_and_freed_after_its_copy_has_ended() -> None:
    """Also if nobody reads it: its memory would otherwise be reused while the copy still writes to it."""
    copies = LateCopies()
    memory = HostMemory(copies, CPU)
    frame = memory.frame([])
    packed = [frame.pack(torch.full((size,), float(size))) for size in (7, 5, 6)]
    frame.end()
    copies.trips.clear()
    assert torch.equal(frame.unpack(packed[1]), torch.full((5,), 5.0))
    assert copies.trips == [-28, -20, -24], "all of the frame, in the order of saving"
    unread = packed[0].kept._here
    assert unread is not None
    buffer, event = unread
    assert event._values is not None, "under way"
    del unread, packed, frame
    gc.collect()
    assert event._values is None, "ended before the memory was freed"
    assert torch.equal(buffer.view(torch.float32), torch.full((7,), 7.0))


def test_functions_that_deepspeeds_checkpoint_calls_keep_their_inputs_on_the_host(monkeypatch: Any) -> None:
    layer, start, copies = nn.Linear(8, 8), torch.randn(4, 8), LateCopies()

    def gradients() -> tuple[torch.Tensor, ...]:
        given = start.clone().requires_grad_()
        hidden = checkpointing.checkpoint(lambda x, factor: layer(x * factor).tanh(), given, 2.0)
        return torch.autograd.grad(checkpointing.checkpoint(layer, hidden).sum(), [given, *layer.parameters()])

    expected = gradients()
    # A CPU computes in host memory, so that nothing opens one.
    monkeypatch.setitem(checkpointing._HOST, "memory", BlocksOnHost(copies, CPU))
    assert all(map(torch.equal, gradients(), expected))
    assert copies.trips == [start.nbytes] * 2 + [-start.nbytes] * 2  # the input of each call
    with torch.no_grad():
        assert torch.equal(checkpointing.checkpoint(layer, start), layer(start))
    with pytest.warns(UserWarning, match="cpu_checkpointing: a CPU keeps its activations in host memory anyway"):
        checkpointing.configure(None, {"activation_checkpointing": {"cpu_checkpointing": True}})
    assert checkpointing._HOST == {}
