"""The table of the runtime's wings names what is there."""

from __future__ import annotations

import pytest

from zero_runtime import wings

PLACES = [name for name in vars(wings) if name.isupper()]


@pytest.mark.parametrize("name", PLACES)
def test_each_place_of_the_table_is_there(name: str) -> None:
    assert callable(wings.load(getattr(wings, name)))
