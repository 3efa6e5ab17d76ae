"""The table of the runtime's wings names what is there."""

from __future__ import annotations

import pytest

from zero_runtime import wings

TABLE = [value for name, value in vars(wings).items() if name.isupper()]
PLACES = [place for value in TABLE for place in (value.values() if isinstance(value, dict) else [value])]


@pytest.mark.parametrize("place", PLACES)
def test_each_place_of_the_table_is_there(place: str) -> None:
    assert callable(wings.load(place))
