"""The formats of numbers: a change that rounds to none has no sign."""

import pytest

from orchestrator.text.units import change_text


@pytest.mark.parametrize(
    ("ratio", "text"), [(1.052, "+5.2 %"), (0.948, "-5.2 %"), (1.0, "0.0 %"), (0.9999, "0.0 %"), (1.0004, "0.0 %")]
)
def test_a_change_has_a_sign_only_if_it_does_not_round_to_none(ratio: float, text: str) -> None:
    assert change_text(ratio) == text
