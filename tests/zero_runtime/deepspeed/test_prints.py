"""The engine's output on rank 0: progress, times by phase, the configuration, and the profile of a forward."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from harness.ranks import run_alone, run_ranks
from harness.seed_loop import initialize_quietly
from torch import nn

MICRO, WIDTH, INNER = 2, 8, 32
UP = DOWN = 2 * MICRO * WIDTH * INNER  # operations of a product in a forward
CONFIG: dict[str, Any] = {
    "gradient_accumulation_steps": 2,
    "train_micro_batch_size_per_gpu": MICRO,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.25, "betas": [0.8, 0.95]}},
}


def _train(more: dict[str, Any], steps: int = 4) -> tuple[list[str], torch.Tensor, Any]:
    """The lines printed in `steps` steps, the losses, and the engine."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, INNER), nn.Tanh(), nn.Linear(INNER, WIDTH)), nn.Tanh())
    losses = []
    with redirect_stdout(io.StringIO()) as out:
        engine, *_ = initialize_quietly(model=model, config={**CONFIG, **more})
        for _ in range(2 * steps):
            loss = engine(torch.ones(MICRO, WIDTH)).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
    return out.getvalue().splitlines(), torch.tensor(losses), engine


def progress() -> None:
    silent, expected, _ = _train({})
    never, *_ = _train({"steps_per_print": "inf"})
    lines, losses, _ = _train({"steps_per_print": 2, "wall_clock_breakdown": True})
    assert torch.equal(losses, expected)
    assert silent == never == []
    if torch.distributed.get_rank() != 0:
        assert lines == []
        return
    for number, (step, times) in enumerate(zip(lines[::2], lines[1::2], strict=True), start=1):
        start = re.escape(f"step={2 * number}, skipped=0, lr=[0.25], mom=[(0.8, 0.95)], samples/s=")
        assert re.fullmatch(rf"{start}\d[\d.e+]*", step), step
        phases = re.fullmatch(r"time \(ms\)((?: \| \w+: \d+\.\d\d)+)", times)
        assert phases, times
        assert {"fwd", "bwd", "step", "communication_exposed", "other"} <= set(re.findall(r"\w+", phases[1]))
    assert len(lines) == 4


def test_steps_per_print_and_wall_clock_breakdown_print_on_rank_0_and_change_no_loss() -> None:
    run_ranks(progress, 2)


def profiled(file: str) -> None:
    section: dict[str, Any] = {"enabled": True, "profile_step": 2, "top_modules": 2}
    expected = _train({})[1]
    for stage in (2, 3):
        lines, losses, _ = _train({"flops_profiler": section, "zero_optimization": {"stage": stage}})
        assert torch.equal(losses, expected)
        if torch.distributed.get_rank() != 0:
            assert lines == []
            continue
        place = next(
            place for place, line in enumerate(lines) if line.startswith("flops_profiler: step 2, rank 0 of 2")
        )
        assert [line.partition("=")[0] for line in lines[:place:2]] == ["step"] * 2  # and their times, as in DeepSpeed
        _check_table(lines[place + 1 :])
    one = {**section, "module_depth": 1, "detailed": False, "output_file": file}
    _train({"flops_profiler": one})
    if torch.distributed.get_rank() == 0:
        _, header, whole, *most = Path(file).read_text().splitlines()
        assert (header.split()[0], whole.split()[0]) == ("module", "(root)")
        assert {line.rpartition(" at depth ")[2][0] for line in most} == {"0", "1"}


def _check_table(lines: list[str]) -> None:
    assert lines[0].split() == ["module", "class", "params", "FLOPs", "microseconds", "MACs", "FLOPS"]
    sizes = {"up": WIDTH * INNER + INNER, "down": WIDTH * INNER + WIDTH}
    block = (sum(sizes.values()), UP + DOWN)
    expected = [
        ("(root)", "Sequential", *block),
        ("0", "Sequential", *block),
        ("0", "Linear", sizes["up"], UP),
        ("1", "Tanh", 0, 0),
        ("2", "Linear", sizes["down"], DOWN),
        ("1", "Tanh", 0, 0),
    ]
    for line, (name, kind, params, flops) in zip(lines[1:], expected, strict=False):
        label, found, *numbers = line.replace(",", "").split()
        counted, operations, took, macs, rate = map(int, numbers)
        assert (label, found, counted, operations, macs) == (name, kind, params, flops, flops // 2)
        assert rate == (10**6 * flops // took if took else 0)
    most = lines[1 + len(expected) :]
    assert most[6] == f"most params at depth 2: Linear {sum(sizes.values()):,}"
    assert most[7] == f"most FLOPs at depth 2: Linear {UP + DOWN:,}"


def test_the_profile_of_a_forward_counts_each_module_and_changes_no_loss(tmp_path: Path) -> None:
    run_ranks(profiled, 2, str(tmp_path / "new" / "profile.txt"))


def dumped() -> None:
    import zero_runtime

    lines, _, engine = _train({"dump_state": True, "zero_optimization": {"stage": 1, "overlap_comm": True}}, steps=0)
    assert lines[0] == "DeepSpeedEngine configuration:"
    assert lines == engine.config.text("DeepSpeedEngine configuration").splitlines()
    with redirect_stdout(io.StringIO()) as out:
        zero_runtime.DeepSpeedConfig({**CONFIG, "zero_optimization": {"stage": 1}}).print("read")
    assert out.getvalue().splitlines()[0] == "read:"
    assert "  given: zero_optimization.stage = 1" in out.getvalue().splitlines()


def test_dump_state_prints_the_whole_configuration_at_the_start() -> None:
    run_alone(dumped)
