"""What is counted of an operation: real tensors beside fake ones, and a mask as attention converts it."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from zero_runtime.predict.memory.activation_trace import Counter, _bias, _FakesOfReal

_add, _add_ = torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor


def fake_of(real: torch.Tensor) -> torch.Tensor:
    return FakeTensorMode(allow_non_fake_inputs=True).from_tensor(real)


def test_each_view_of_a_real_tensor_is_made_fake_once() -> None:
    fakes, table, fake = _FakesOfReal(), torch.ones(4, 2), fake_of(torch.ones(4, 2))
    first, second = (fakes.in_place_of_real(_add, (fake, table.unsqueeze(0)))[1] for _ in range(2))
    assert first is second
    assert (first.fake_mode, first.shape, first.stride()) == (fake.fake_mode, (1, 4, 2), (8, 2, 1))
    other = fakes.in_place_of_real(_add, (fake, table[1:]))[1]
    assert (other.shape, other.storage_offset()) == ((3, 2), 2)


def test_a_storage_at_the_address_of_one_that_has_ended_is_another() -> None:
    fakes, fake = _FakesOfReal(), fake_of(torch.ones(4))
    real = torch.ones(4)
    fakes.in_place_of_real(_add, (fake, real))
    (key,) = fakes._made
    del real
    assert fakes._made[key][0]() is None


def test_real_tensors_are_left_alone_without_fake_ones_and_where_one_is_changed() -> None:
    fakes, real, fake = _FakesOfReal(), torch.ones(4), fake_of(torch.ones(4))
    for func, args in ((_add, (real, real)), (_add, (real, 2.0)), (_add_, (fake, real))):
        assert fakes.in_place_of_real(func, args) is args


def test_the_storages_of_real_tensors_are_counted_as_they_are() -> None:
    kept = fake_of(torch.ones(64))
    with Counter([kept]) as counter:
        table = torch.ones(64)
        for _ in range(2):
            kept * table
        del table
    assert counter.trace.sizes == [256, 256, 256]
    assert counter.trace.events == [1, 2, -2, 3, -3, -1]


def test_a_mask_is_converted_in_the_storages_that_torch_takes() -> None:
    """torch's attention on this build, with a real mask and real heads, is what the count of a GPU's must follow."""
    mask, fakes = torch.ones(2, 1, 16, 16, dtype=torch.bool).tril(), FakeTensorMode(allow_non_fake_inputs=True)
    heads = torch.zeros(2, 4, 16, 32, dtype=torch.bfloat16)
    with Counter([heads, mask]) as real:
        torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, mask)
    fake = fakes.from_tensor(heads)
    with Counter([fake, mask]) as counted:
        bias = _bias(mask, fake, fake)
    assert bias is not None
    assert isinstance(bias, FakeTensor)  # no operation of seq x seq is computed
    bytes_of_bias = 2 * mask.numel()
    assert counted.trace.sizes == [bytes_of_bias] == real.trace.sizes[:1]
