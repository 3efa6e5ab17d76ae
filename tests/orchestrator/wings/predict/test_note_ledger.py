"""The ledger of a note on ZeRO: its sums are its own, and the bytes here are those that are counted elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.warm_shapes import WarmShapes

from orchestrator import cli
from orchestrator.config.strict import Refusal
from orchestrator.wings.predict import counting_child, fit_arithmetic, note_ledger
from orchestrator.wings.predict import fit as command
from orchestrator.wings.predict.fit_rows import Fit
from orchestrator.wings.predict.note_ledger import HALF, SENDS, K
from zero_runtime.predict.memory.counted_unit import OPTIMIZER, PARAMS

RANKS = 4
FIXED = ("model=llama_tiny", "hardware=a10", "hardware.gpus=4", f"resources.ranks={RANKS}", "batch.micro=2")
LINE = (*FIXED, "offload=none", "recompute=none", "loss=full")
HALVES = ("precision.reduce=bf16", "precision.accumulate=bf16")


@pytest.fixture(autouse=True)
def counted(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "ledger"))
    monkeypatch.setattr(counting_child, "start_process", WarmShapes)


def rows(*words: str) -> dict[int, Fit]:
    fits = command.fits_of(command._points([*LINE, *words], None), quiet=True)
    return {one.config.zero.stage: one for one in fits}


def test_each_stage_has_the_note_s_steps_and_its_sum() -> None:
    for stage, fit in rows(*HALVES).items():
        found, phi = note_ledger.steps(fit), fit_arithmetic.psi(fit)
        assert len(found) == {0: 5, 1: 6, 2: 6, 3: 8}[stage]
        sent = [one for one in found if one.does == SENDS]
        assert sum(one.note for one in sent) == (3 if stage == 3 else 2) * HALF * phi
        # What is sent in the note's dtypes is the ring's share of it. Flat units are padded to equal parts.
        assert sum(one.here for one in sent) == fit.sent_bytes
        for one in sent:
            assert one.here == pytest.approx(one.note * (RANKS - 1) / RANKS, rel=1e-3), one
        states, halves = found[:2]
        assert states.note == K * phi // (RANKS if stage else 1)
        assert states.here == fit.peak.states[OPTIMIZER]
        assert halves.here == fit.peak.states[PARAMS]


def test_fp32_gradients_are_sent_in_twice_the_note_s_bytes() -> None:
    narrow, wide = rows(*HALVES)[2], rows()[2]
    assert note_ledger.steps(wide)[3].here == 2 * note_ledger.steps(narrow)[3].here


def test_the_page_has_the_line_of_the_server(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["fit", *LINE, "zero=stage3", "--explain", "stage3", "--steps"]) == 0
    out = capsys.readouterr().out
    assert "8 update of its own part" in out
    assert "2NΦ = " in out
    assert cli.main(["fit", *LINE, "--steps"]) == 2
    assert "fix: --explain ROW --steps" in capsys.readouterr().err


def test_what_the_note_does_not_describe_is_refused() -> None:
    with pytest.raises(Refusal, match="the note shards over all ranks"):
        note_ledger.steps(rows("zero=stage3", "zero.shard_ranks=2")[3])


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ((), {"parameters": 2, "optimizer": 12, "gradients": 4}),
        (("precision=bf16_pure", "optimizer.state_dtype=bf16", "optimizer.beta2=0.95"), (2, 4, 2)),
        (("optimizer.state_dtype=bf16", "optimizer.beta2=0.95"), (2, 8, 4)),
    ],
)
def test_bytes_of_a_parameter(words: tuple[str, ...], parts: object) -> None:
    found = fit_arithmetic.bytes_of_parameter(rows("zero=stage2", *words)[2])
    assert found == parts or tuple(found.values()) == parts
