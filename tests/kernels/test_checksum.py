"""The compiled checksum matches its note, and both checksums detect the damage that a disk may do to a block."""

from __future__ import annotations

import struct
import zlib

import pytest
import torch

from zero_runtime.kernels import registration
from zero_runtime.kernels.checksum import Checksum, checksum_function, zlib_crc32
from zero_runtime.kernels.cpu import operations
from zero_runtime.kernels.cpu.build import BuildError

PAGE = 4096


def crc32c(data: bytes) -> int:
    """CRC-32C by its definition, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def wanted_of(data: bytes) -> int:
    """See [Note: three lanes] in checksum.cpp."""
    lane = len(data) // 24 * 8
    sums = [crc32c(data[start : start + lane]) for start in (0, lane, 2 * lane)]
    return crc32c(struct.pack("<3I", *sums) + data[3 * lane :])


def noise(size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))


@pytest.fixture(params=["compiled", "zlib"])
def checksum(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Checksum:
    if request.param == "compiled":
        return compiled()
    monkeypatch.setenv(registration.VARIABLE, "reference")
    monkeypatch.setattr(registration, "_prepared", registration._prepared.__wrapped__)  # the variable is read again
    assert checksum_function() is zlib_crc32
    return zlib_crc32


def compiled() -> Checksum:
    try:
        has_checksum = operations.has_checksum()
    except BuildError as error:
        pytest.skip(f"no C++ on this machine: {error}")
    if not has_checksum:
        pytest.skip("this processor has no instruction for CRC-32C")
    return operations.checksum


def test_the_definition_has_the_published_check_value() -> None:
    assert crc32c(b"123456789") == 0xE3069283


@pytest.mark.parametrize("size", [0, 1, 7, 8, 23, 24, 25, 31, 47, 48, 49, 1000, PAGE, 10007])
@pytest.mark.parametrize("offset", [0, 1])
def test_the_compiled_checksum_equals_its_definition(size: int, offset: int) -> None:
    data = noise(size + offset)[offset:]
    assert compiled()(data) == wanted_of(data.numpy().tobytes())


def test_every_flipped_bit_of_a_page_is_detected(checksum: Checksum) -> None:
    page = noise(PAGE)
    right, seen = checksum(page), set()
    for place in range(PAGE):
        for bit in range(8):
            page[place] ^= 1 << bit
            seen.add(checksum(page))
            page[place] ^= 1 << bit
    assert right not in seen
    assert checksum(page) == right


def test_bytes_that_change_places_are_detected(checksum: Checksum) -> None:
    pages = noise(3 * PAGE).view(3, PAGE)
    sums = {checksum(pages[list(order)].flatten()) for order in ((0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 1, 0), (1, 2, 0))}
    assert len(sums) == 5
    zeros, one = torch.zeros(PAGE, dtype=torch.uint8), torch.zeros(PAGE, dtype=torch.uint8)
    one[0] = 1
    assert len({checksum(torch.cat(pair)) for pair in ((zeros, one), (one, zeros), (zeros, zeros))}) == 3
    assert checksum(zeros) != checksum(zeros[:-1]), "a block that ends early"


def test_without_a_compiler_or_the_instruction_zlib_computes_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    data = noise(PAGE)
    compiled()
    with monkeypatch.context() as patch:
        patch.setattr(operations, "has_checksum", lambda: False)
        assert checksum_function()(data) == zlib.crc32(data.numpy().tobytes())
    monkeypatch.setattr(registration, "_prepared", lambda _: False)
    assert checksum_function()(data) == zlib.crc32(data.numpy().tobytes())


def test_the_compiled_function_is_chosen_if_available(monkeypatch: pytest.MonkeyPatch) -> None:
    data = noise(PAGE)
    monkeypatch.setattr(registration, "_prepared", lambda _: True)
    assert compiled()(data) == checksum_function()(data) != zlib.crc32(data.numpy().tobytes())
