"""A file that the YAML reader could never finish reading is refused before the reader gets it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from orchestrator import cli
from orchestrator.compose import arguments, compose, yaml_bounds

LAUGHS = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30))]
)
MERGES = "\n".join(["b0: &b0 {x: 1}", *(f"b{n}: &b{n} {{<<: [*b{n - 1}, *b{n - 1}]}}" for n in range(1, 40))])


@pytest.mark.parametrize("text", [LAUGHS, MERGES])
@pytest.mark.parametrize("place", ["zero", "model", "sweeps", "experiment"])
def test_aliases_that_expand_to_more_than_memory_holds_are_refused(place: str, text: str, tmp_path: Path) -> None:
    (tmp_path / place).mkdir()
    (tmp_path / place / "mine.yaml").write_text(text)
    with pytest.raises(
        compose.ComposeError, match=rf"^{place}/mine\.yaml: expected at most 200,000 values, found alias"
    ):
        compose.compose(arguments.split([f"{place}=mine", "--config-dir", str(tmp_path)]))


def test_aliases_that_expand_to_few_values_are_read(tmp_path: Path) -> None:
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "mine.yaml").write_text("axes: {batch.micro: &few [1, 2], batch.accumulation: *few}")
    assert len(compose.compose(arguments.split(["sweeps=mine", "--config-dir", str(tmp_path)])).points) == 4


def test_a_pipe_or_a_terabyte_as_an_option_file_is_refused_without_reading_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for group in ("model", "zero"):
        (tmp_path / group).mkdir()
        os.mkfifo(tmp_path / group / "pipe.yaml")
    with (tmp_path / "model" / "large.yaml").open("wb") as file:
        file.truncate(1 << 40)
    for word, told in (("model=pipe", "model/pipe"), ("zero=pipe", "zero/pipe"), ("model=large", "1048576 MiB")):
        assert cli.main([word, "--config-dir", str(tmp_path)]) == 2
        assert told in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"zero/pipe\.yaml: expected a file of settings, found no file"):
        yaml_bounds.check(tmp_path / "zero" / "pipe.yaml")
    with pytest.raises(ValueError, match="expected settings of at most 4 MiB"):
        yaml_bounds.check(tmp_path / "model" / "large.yaml")
    yaml_bounds.check(tmp_path / "missing.yaml")
