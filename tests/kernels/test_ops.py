"""Every operation in C++ has the reference's bits for any dtype, length, alignment and number of threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from zero_runtime.kernels import ops, reference, registration
from zero_runtime.kernels.block_formats import (
    ZERO_CODE,
    blocks_of,
    dynamic_codes,
    read_dynamic,
    write_dynamic,
)
from zero_runtime.kernels.cpu import operations
from zero_runtime.kernels.cpu.build import BuildError
from zero_runtime.kernels.settings import Adam, AdamW, Lamb, Lion, Sgd

LENGTHS = (0, 1, 15, 16, 17, 10**6 + 3)
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = (FP32, BF16, FP16)
# Dtypes of master, gradient and parameters: those that precisions use, and those with a separate path in the sources.
MIXES = [(FP32, FP32, None), (FP32, BF16, BF16), (FP32, FP16, FP16), (BF16, BF16, FP16), (FP16, FP32, FP32)]
ADAM = (1e-2, 0.9, 0.95, 1e-8, 0.1, 3)
SCALE = torch.tensor(0.37)
CPU = torch.device("cpu")
Results = list[torch.Tensor]


@pytest.fixture(scope="module")
def cpp() -> ModuleType:
    try:
        operations.library()
    except BuildError as error:
        pytest.skip(f"no C++ on this machine: {error}")
    return operations


@pytest.fixture(scope="module", autouse=True)
def prepared() -> None:
    """The tests that call `ops` run what a training run would."""
    registration.prepare(CPU)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def random(numel: int, seed: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    """Random values over many magnitudes, a few of them zero: a new tensor, of values that are drawn once."""
    return drawn(numel, seed, dtype).clone()


@cache
def drawn(numel: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator) * 10.0 ** torch.randint(-6, 3, (numel,), generator=generator)
    return torch.where(torch.rand(numel, generator=generator) < 0.05, 0.0, values).to(dtype)


def off_by(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """The same values `offset` elements after an aligned address."""
    return torch.cat([tensor.new_zeros(offset), tensor])[offset:]


Mix = tuple[torch.dtype, torch.dtype, torch.dtype | None]
Place = Callable[[torch.Tensor], torch.Tensor]


class Operands:
    """New tensors of one length, each put in memory by `place`."""

    def __init__(self, numel: int, mix: Mix, place: Place = lambda tensor: tensor) -> None:
        master, grad, out = mix
        self.numel = numel
        self.place = place
        self.master = place(random(numel, 1, master))
        self.grad = place(random(numel, 2, grad))
        self.first = place(random(numel, 3))
        self.second = place(random(numel, 4).abs())
        self.out = None if out is None else place(torch.zeros(numel, dtype=out))

    def with_bf16_states(self) -> Operands:
        """The same operands with states in bf16, put in memory in the same way."""
        self.first = self.place(random(self.numel, 3, BF16))
        self.second = self.place(random(self.numel, 4).abs().to(BF16))
        return self

    @property
    def all(self) -> Results:
        return [self.master, self.first, self.second, *([] if self.out is None else [self.out])]


def adam_with(settings: AdamW) -> Callable[[ModuleType, Operands], Results]:
    def run(which: ModuleType, o: Operands) -> Results:
        which.adamw_(o.master, o.grad, o.first, o.second, SCALE, settings.numbers, o.out)
        return o.all

    return run


def sgd_with(settings: Sgd) -> Callable[[ModuleType, Operands], Results]:
    def run(which: ModuleType, o: Operands) -> Results:
        momentum_buffer = o.first if settings.momentum else None
        flags = (settings.nesterov, settings.is_first)
        which.sgd_(o.master, o.grad, momentum_buffer, SCALE, settings.numbers, *flags, o.out)
        return o.all

    return run


def lion(which: ModuleType, o: Operands) -> Results:
    which.lion_(o.master, o.grad, o.first, SCALE, Lion(1e-2, 0.9, 0.98, 0.1).numbers, o.out)
    return o.all


def lamb(which: ModuleType, o: Operands) -> Results:
    settings = Lamb(*ADAM)
    which.lamb_moments_(o.grad, o.first, o.second, SCALE, settings.numbers)
    squares = which.lamb_squares(o.master, o.first, o.second, settings.lamb_numbers)
    which.lamb_(o.master, o.first, o.second, SCALE, settings.lamb_numbers, o.out)
    return [*o.all, squares]


def adamw8bit(which: ModuleType, o: Operands) -> Results:
    codes = [torch.full((o.numel,), code, dtype=torch.uint8) for code in (ZERO_CODE, 0)]
    scales = [torch.zeros(blocks_of(o.numel)) for _ in range(2)]
    for step in (1, 2):
        states = (codes[0], scales[0], codes[1], scales[1])
        which.adamw8bit_(o.master, o.grad, *states, SCALE, AdamW(1e-2, 0.9, 0.95, 1e-8, 0.1, step).numbers, o.out)
    return [*o.all, *codes, *scales]


def bf16_states(run: Callable[[ModuleType, Operands], Results]) -> Callable[[ModuleType, Operands], Results]:
    return lambda which, o: run(which, o.with_bf16_states())


def streams(which: ModuleType, o: Operands) -> Results:
    squares = which.sum_of_squares(o.grad)
    which.accumulate_(o.master, o.grad, 0.3)
    if o.out is not None:
        which.cast_copy_(o.out, o.grad)
    return [*o.all, squares]


OPERATIONS: dict[str, Callable[[ModuleType, Operands], Results]] = {
    "adamw": adam_with(AdamW(*ADAM)),
    "adam": adam_with(Adam(*ADAM)),
    "adam_without_decay": adam_with(Adam(1e-2, 0.4, 0.95, 1e-8, 0.0, 1)),  # also takes the other branch of torch's lerp
    "sgd": sgd_with(Sgd(1e-2, 0.9, 0.1, 0.1, False, 2)),
    "sgd_first": sgd_with(Sgd(1e-2, 0.9, 0.1, 0.1, False, 1)),
    "sgd_plain": sgd_with(Sgd(1e-2, 0.0, 0.0, 0.1, False, 2)),
    "nesterov": sgd_with(Sgd(1e-2, 0.9, 0.0, 0.0, True, 2)),
    "lion": lion,
    "adamw_bf16_states": bf16_states(adam_with(AdamW(*ADAM))),
    "adam_bf16_states": bf16_states(adam_with(Adam(1e-2, 0.4, 0.95, 1e-8, 0.0, 1))),
    "sgd_bf16_states": bf16_states(sgd_with(Sgd(1e-2, 0.9, 0.1, 0.1, False, 2))),
    "nesterov_bf16_states": bf16_states(sgd_with(Sgd(1e-2, 0.9, 0.0, 0.0, True, 1))),
    "lion_bf16_states": bf16_states(lion),
    "lamb": lamb,
    "adamw8bit": adamw8bit,
    "streams": streams,
}


def assert_same_bits(found: Results, wanted: Results) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.isnan(), other.isnan())
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize("numel", LENGTHS)
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_has_the_bits_of_the_reference(cpp: ModuleType, name: str, numel: int) -> None:
    for mix in MIXES if numel < 100 else MIXES[:3]:
        run = OPERATIONS[name]
        assert_same_bits(run(cpp, Operands(numel, mix)), run(reference, Operands(numel, mix)))


@pytest.mark.parametrize("name", OPERATIONS)
def test_views_at_odd_offsets_have_the_same_bits(cpp: ModuleType, name: str) -> None:
    for numel, offset in ((1003, 1), (70001, 3), (1003, 13)):
        for mix in MIXES:
            placed = Operands(numel, mix, lambda tensor, offset=offset: off_by(tensor, offset))
            assert_same_bits(OPERATIONS[name](cpp, placed), OPERATIONS[name](reference, Operands(numel, mix)))


def test_what_goes_past_the_caches_has_the_same_bits_at_odd_offsets(cpp: ModuleType) -> None:
    numel = (1 << 20) + 5
    for mix in MIXES[1:3]:
        placed = Operands(numel, mix, lambda tensor: off_by(tensor, 3))
        assert_same_bits(streams(cpp, placed), streams(reference, Operands(numel, mix)))


@pytest.mark.parametrize("name", OPERATIONS)
def test_one_thread_and_several_give_the_same_bits(cpp: ModuleType, name: str) -> None:
    results = []
    for count in (1, 2, 3):
        with threads(count):
            results.append(OPERATIONS[name](cpp, Operands(300_003, MIXES[1])))
    assert_same_bits(results[1], results[0])
    assert_same_bits(results[2], results[0])


@pytest.mark.parametrize("name", OPERATIONS)
def test_numbers_that_are_none_spread_as_in_the_reference(cpp: ModuleType, name: str) -> None:
    for grad_dtype in DTYPES:
        found, wanted = (Operands(1003, (FP32, grad_dtype, BF16)) for _ in range(2))
        for operands in (found, wanted):
            operands.grad[[0, 300, 1002]] = torch.tensor([torch.inf, -torch.inf, torch.nan], dtype=grad_dtype)
            operands.first[17], operands.second[18], operands.second[19] = torch.nan, torch.inf, -1.0
            operands.master[20] = torch.inf
        assert_same_bits(OPERATIONS[name](cpp, found), OPERATIONS[name](reference, wanted))


def test_strided_layouts_and_wide_dtypes_use_the_reference(cpp: ModuleType) -> None:
    strided = torch.zeros(20)[::2]
    cpp.accumulate_(strided, torch.ones(10), 2.0)
    wide = torch.zeros(10, dtype=torch.float64)
    cpp.cast_copy_(wide, strided)
    assert wide.tolist() == [2.0] * 10


# ---- what the operations promise -------------------------------------------------------------------------------------


@pytest.mark.parametrize("numel", [1, 1000, 100_003])
def test_the_sum_of_squares_is_computed_in_fp64_and_finite_if_all_elements_are(numel: int) -> None:
    values = random(numel, 5)
    exact = float(values.double().square().sum())
    # Squares of fp32 are exact in fp64; two orders of n sums differ by at most 2 n roundings.
    assert float(ops.sum_of_squares(values)) == pytest.approx(exact, rel=2 * numel * 2.0**-53)
    assert bool(ops.sum_of_squares(torch.full((numel,), torch.finfo(FP32).max)).isfinite())
    for bad in (torch.inf, torch.nan):
        values[numel // 2] = bad
        assert not bool(ops.sum_of_squares(values).isfinite())


def test_dynamic_codes_are_256_ascending_numbers_and_keep_second_moments_above_zero() -> None:
    for signed in (True, False):
        table = dynamic_codes(torch.device("cpu"), signed=signed)
        assert table.numel() == 256
        assert bool((table.diff() > 0).all())
        assert float(table[-1]) == 1.0
    operands = Operands(256, (FP32, FP32, None))
    operands.grad = torch.logspace(-10, 0, 256)
    *_, second_codes, _, _ = adamw8bit(operations if registration.prepare(CPU) else reference, operands)
    assert bool((second_codes > 0).all())


@pytest.mark.parametrize("signed", [True, False])
def test_values_read_from_codes_are_written_as_the_same_codes(signed: bool) -> None:
    values = random(20_003, 7) * 10.0 ** torch.randint(-12, 4, (20_003,), generator=torch.Generator().manual_seed(8))
    values[256:512], values[600], values[610] = -values[256:512].abs(), 9e4, -9e4
    values = values if signed else values.abs()
    codes, scales = torch.zeros(20_003, dtype=torch.uint8), torch.zeros(blocks_of(20_003))
    write_dynamic(values, codes, scales, signed=signed)
    found = read_dynamic(codes, scales, signed=signed)
    largest = torch.stack([block[block.abs().argmax()] for block in values.split(256)])
    assert torch.equal(scales, largest)
    again, scales_again = torch.zeros_like(codes), torch.zeros_like(scales)
    write_dynamic(found, again, scales_again, signed=signed)
    assert torch.equal(again, codes)
    assert torch.equal(scales_again, scales)
    # Half of the widest step between codes, which is 0.9 / 64 of the scale (0.9 / 128 unsigned), and three roundings.
    step = (0.9 / (64 if signed else 128) / 2 + 3 * 2.0**-24) * scales.abs().repeat_interleave(256)[:20_003]
    assert bool(((found - values).abs() <= step).all())


def test_short_operands_are_refused_before_any_address_is_used() -> None:
    five, four = torch.zeros(5), torch.zeros(4)
    with pytest.raises(ValueError, match="adamw_: expected exp_avg of 5 elements on cpu, found 4 on cpu"):
        ops.adamw_(five, five, four, five, SCALE, AdamW(*ADAM))
    with pytest.raises(ValueError, match="expected a scale of one element, found 5"):
        ops.lion_(five, five.clone(), five.clone(), five, Lion(1e-2, 0.9, 0.9, 0.0))
    codes = torch.zeros(5, dtype=torch.uint8)
    with pytest.raises(ValueError, match="adamw8bit_: expected exp_avg_scale of 1 elements on cpu, found 0 on cpu"):
        ops.adamw8bit_(five, five, codes, torch.zeros(0), codes, torch.zeros(1), SCALE, AdamW(*ADAM))


def calls() -> dict[str, tuple[object, ...]]:
    numel = 300
    wide = [random(numel, seed) for seed in range(4)]
    wide[3].abs_()
    codes, scales = torch.zeros(numel, dtype=torch.uint8), torch.zeros(2)
    out = torch.zeros(numel, dtype=BF16)
    master, grad, first, second = wide
    adam, lamb = AdamW(*ADAM).numbers, Lamb(*ADAM)
    sgd, lion = Sgd(0.1, 0.9, 0, 0, False, 2).numbers, Lion(0.1, 0.9, 0.9, 0).numbers
    return {
        "adamw_": (*wide, SCALE, adam, out),
        "adamw8bit_": (master, grad, codes, scales, codes.clone(), scales.clone(), SCALE, adam, out),
        "sgd_": (master, grad, first, SCALE, sgd, False, False),
        "lion_": (master, grad, first, SCALE, lion, out),
        "lamb_moments_": (grad, first, second, SCALE, lamb.numbers),
        "lamb_squares": (master, first, second, lamb.lamb_numbers),
        "lamb_": (master, first, second, SCALE, lamb.lamb_numbers, out),
        "accumulate_": (master, out, 0.5),
        "cast_copy_": (out, master),
        "sum_of_squares": (master,),
    }


def test_the_registered_operations_are_those_that_are_checked_here() -> None:
    declared = {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("zero_lab::")}
    assert declared == set(calls())


@pytest.mark.parametrize("name", calls())
def test_every_operation_passes_torchs_own_checks(name: str) -> None:
    torch.library.opcheck(getattr(torch.ops.zero_lab, name).default, calls()[name])


def test_fake_tensors_pass_through_and_nothing_is_compiled_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "library", lambda: pytest.fail("compiled for a fake tensor"))
    with FakeTensorMode():
        four = [torch.empty(100) for _ in range(4)]
        ops.adamw_(*four, torch.empty(()), AdamW(*ADAM), torch.empty(100, dtype=BF16))
        assert ops.sum_of_squares(four[0]).dtype == torch.float64


def _after_a_fork_of_busy_threads() -> bool:
    """Runs an update in a child of a process that has used several threads, of the kernels and of torch."""
    operands = Operands(300_003, MIXES[1])
    kernels = operations if registration.prepare(CPU) else reference
    with threads(3):
        OPERATIONS["adamw"](kernels, operands)
        child = os.fork()
        if child == 0:
            OPERATIONS["adamw"](kernels, operands)
            os._exit(0)
        return os.waitpid(child, 0)[1] == 0


@pytest.mark.full
def test_a_fork_after_threads_were_used_does_not_hang() -> None:
    from harness.ranks import run_alone

    assert run_alone(_after_a_fork_of_busy_threads, timeout_s=60)
