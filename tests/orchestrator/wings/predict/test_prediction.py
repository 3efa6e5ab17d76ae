"""The memory of a point is predicted before it runs: the memory model is applied to shapes from a child process."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, NamedTuple
from unittest.mock import Mock

import pytest

from orchestrator import api, cli
from orchestrator.compose import arguments, compose
from orchestrator.config.schema import Device, RunConfig
from orchestrator.config.strict import Refusal
from orchestrator.machine import hardware
from orchestrator.machine.hardware import Hardware
from orchestrator.planning import decision
from orchestrator.planning.point import Point, Wishes
from orchestrator.planning.points import checked_points
from orchestrator.planning.predictor import predictor
from orchestrator.planning.rules.scene import Scene
from orchestrator.records.cache import cache_file
from orchestrator.records.run_state import RunState
from orchestrator.records.sweep_record import Planned
from orchestrator.report import sweep_table
from orchestrator.wings.predict import counting_child, memory_cache, point_prediction, prediction, remedies
from orchestrator.wings.predict.memory_cache import units_key
from orchestrator.wings.predict.point_prediction import PointPrediction
from orchestrator.wings.predict.step import Memories
from orchestrator.wings.predict.tensor_messages import TensorMessages
from zero_runtime.precision import MixedPrecision
from zero_runtime.predict.memory.device_overhead import DeviceOverhead
from zero_runtime.predict.memory.outside_step import MomentBytes
from zero_runtime.predict.memory.step_memory import Peak
from zero_runtime.state_bytes import StateBytes

LAPTOP = Hardware(cores=4, cpu="cpu")
LLAMA_TINY = 1_869_504


def points(line: str) -> list[Point]:
    found, problems = checked_points(compose.compose(arguments.split(line.split())), Scene(LAPTOP))
    assert problems == []
    return found


PAPER = "-m zero=stage0,stage3 precision=fp32,bf16 resources.ranks=2 resources.device=cpu"
CODED = "zero=stage0 precision=fp32 optimizer=adamw8bit resources.ranks=2 resources.device=cpu"
SIZES = "-m batch.micro=2,4,8 recompute=none,full resources.ranks=2 resources.device=cpu"
LARGE_BATCH = "zero=stage0 precision=fp32 batch.micro=8 resources.device=cpu resources.ranks=1"
BOGUS = "+model.config.bogus=1 precision=fp32 resources.device=cpu"
HEADS = "-m precision=fp32 model.config.num_attention_heads=5,6 resources.device=cpu"
MISSPELT = "-m precision=fp32 zero=stage1,stage2 +model.config.num_hidden_layer=2 resources.device=cpu"


def logits_scaled_after_the_head() -> Point:
    (point,) = points("loss=tiled model=llama_tiny resources.device=cpu")
    model = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None}
    scaled = replace(point.config.model, name="scaled", model_type="cohere", config=model)
    return replace(point, config=replace(point.config, model=scaled))


class Told(NamedTuple):
    cache: Path
    labels: set[str]  # of the points that have a prediction


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """A cache that one child process has filled with all answers that the tests need: a child's imports take 8 s."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        found = [point for line in (PAPER, CODED, SIZES, BOGUS, HEADS, MISSPELT) for point in points(line)]
        (large,) = points(LARGE_BATCH)
        smaller = [replace(large, config=one.config) for one in remedies.neighbours(large.config)]
        bad = replace(large.config, model=replace(large.config.model, config={"hidden_size": -1}))
        found += [large, *smaller, replace(large, label="bad", config=bad), logits_scaled_after_the_head()]
        return Told(folder, set(prediction.predictions(found)))


@pytest.fixture
def cache(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(told.cache))


def test_predicted_states_match_the_papers_formulas_and_a_second_prediction_starts_no_child(
    cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = points(PAPER)
    predicted = prediction.predictions(found)
    # Bytes per parameter: fp32 4 + 4 + 8; bf16 at least 2 + 4 + 12, since a CPU may compute in fp32.
    assert predicted["stage0-fp32"].states.total == 16 * LLAMA_TINY
    assert 8 * LLAMA_TINY <= predicted["stage3-fp32"].states.total <= 8 * LLAMA_TINY + 4096
    assert predicted["stage0-bf16"].states.total >= 18 * LLAMA_TINY
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert prediction.predictions(found) == predicted


def test_8_bit_optimizer_states_are_predicted_with_the_padding_of_their_blocks(cache: None) -> None:
    (found,) = prediction.predictions(points(CODED)).values()
    exact, padded_units = (4 + 4 + 2 * (1 + 4 / 256)) * LLAMA_TINY, 10
    assert exact < found.states.total <= exact + padded_units * 2 * 256 * 10.03125


def test_a_model_that_cannot_be_built_has_no_prediction_and_the_others_have(told: Told) -> None:
    assert "bad" not in told.labels
    assert {"stage0-fp32", "stage3-bf16", "micro2-recompute_none", "micro8-recompute_full"} <= told.labels


GIB = 1 << 30
STATES = StateBytes(GIB, GIB, GIB, 0)
HELD = {"params": GIB, "optimizer": GIB}
LARGE = Peak(5 * GIB, HELD, GIB, GIB, GIB, inputs=0, buffers=0, when="in the backward of h.0")


def test_a_point_that_cannot_fit_is_pruned_with_its_arithmetic_unless_pruning_is_off(tmp_path: Path) -> None:
    (point,) = points(f"zero=stage0 resources.device=cpu output={tmp_path}")

    def decided(prediction: PointPrediction, **wishes: bool) -> Planned:
        (planned,) = decision.decide(
            [point], tmp_path, lambda _: "cpu", Wishes(**wishes), {point.label: prediction.brief()}
        )
        return planned

    huge = PointPrediction(STATES, 4 * GIB, ranks_share=2)
    assert decided(huge).decision is RunState.pruned
    assert decided(huge).reason == "the model states alone, 2 x 3.00 GiB, are more than 4.00 GiB"
    assert decided(huge, prune=False).decision is RunState.queued
    assert decided(PointPrediction(STATES, 6 * GIB, ranks_share=2)).decision is RunState.queued
    assert decided(PointPrediction(STATES, 5 * GIB, peak=LARGE)).decision is RunState.queued
    advised = PointPrediction(STATES, 5 * GIB - 1, peak=LARGE, remedies=("batch.micro=2",), advised=True)
    assert decided(advised).reason == (
        "needs 5.00 GiB in the backward of h.0, more than 5.00 GiB: parameters 1.00 GiB, optimizer states and masters "
        "1.00 GiB, activations of the blocks 1.00 GiB, embedding, head and loss 1.00 GiB, gradients of activations "
        "1.00 GiB; would fit: batch.micro=2"
    )
    assert decided(advised).predicted["needed"] == 5 * GIB


def test_on_a_gpu_what_cuda_nccl_and_cublas_take_is_part_of_the_prediction_and_of_its_reason() -> None:
    overhead = DeviceOverhead.on_cuda(8, 8)
    found = PointPrediction(STATES, 3 * GIB + overhead.least, overhead=overhead)
    assert (found.needed_bytes, found.cannot_fit) == (3 * GIB + overhead.least, False)
    tight = replace(found, limit_bytes=3 * GIB + overhead.least - 1)
    assert tight.cannot_fit
    assert point_prediction.cannot_fit(tight) == (
        "the model states, 3.00 GiB, with an allowance of 1.92 GiB for CUDA, cuBLAS and 3 NCCL communicators are more "
        "than 4.92 GiB"
    )
    large = replace(tight, peak=LARGE)
    assert (large.needed_bytes, large.ceiling_bytes) == (5 * GIB + overhead.least, 5 * GIB + overhead.most)
    assert "gradients of activations 1.00 GiB, an allowance of 1.92 GiB for CUDA" in point_prediction.cannot_fit(large)
    assert large.to_dict()["device_overhead"]["communicators"] == 3
    alone = "the model states alone, 3.00 GiB, are more than 2.00 GiB"
    assert point_prediction.cannot_fit(replace(tight, limit_bytes=2 * GIB)) == alone


def test_the_worst_moment_that_a_run_meets_decides_and_is_named() -> None:
    saving = MomentBytes("saving a state", 4 * GIB, 3 * GIB, "a copy of the parts")
    cpu = PointPrediction(STATES, 13 * GIB, ranks_share=2, peak=LARGE, host_bytes=GIB, outside=(saving,), on_host=True)
    assert (cpu.needed_bytes, cpu.ceiling_bytes, cpu.cannot_fit) == (7 * GIB, 7 * GIB, True)
    told = "2 x 7.00 GiB while saving a state (a copy of the parts), more than 13.0 GiB"
    assert point_prediction.cannot_fit(cpu) == f"needs {told}"
    assert point_prediction.expected(cpu).startswith(
        "a peak of 4.00 GiB of tensors a rank and 3.00 GiB of copies in host memory, while saving a state (a copy of"
    )
    step = replace(cpu, outside=(), limit_bytes=11 * GIB)
    assert "2 x 6.00 GiB in the backward of h.0" in point_prediction.cannot_fit(step)
    assert "host buffers of offload 1.00 GiB" in point_prediction.cannot_fit(step)
    names = [moment["name"] for moment in cpu.to_dict()["moments"]]
    assert names == [point_prediction.STEP, "saving a state"]


def test_a_node_needs_host_memory_for_the_worst_moment_of_its_ranks() -> None:
    saving = MomentBytes("saving a state", 4 * GIB, 3 * GIB, "a copy of the parts")
    gpus = PointPrediction(STATES, 6 * GIB, peak=LARGE, host_bytes=GIB, outside=(saving,), ranks_per_node=4)
    assert (gpus.needed_bytes, gpus.cannot_fit) == (5 * GIB, False)  # the host's memory is not known
    assert not replace(gpus, host_limit_bytes=12 * GIB).cannot_fit
    small = replace(gpus, host_limit_bytes=12 * GIB - 1)
    assert small.cannot_fit
    assert point_prediction.cannot_fit(small) == (
        "needs 4 x 3.00 GiB of host memory while saving a state (a copy of the parts), more than a node's 12.0 GiB"
    )


def test_only_points_on_gpus_have_the_allowance() -> None:
    (point,) = points("zero=stage3 resources.device=cpu resources.ranks=4")
    unit = {"name": "h.0", "shapes": [["weight", [8, 8]]], "trainable": True, "is_root": True, "offloaded": False}
    unit["numel"] = 64
    shapes = {"units": [unit | {"precision": asdict(MixedPrecision())}], "state_bytes": 8, "block_numel": 1}
    shapes |= {"buffer_bytes": 0, "tensor": TensorMessages().plain()}
    on_gpu = replace(point.config, resources=replace(point.config.resources, device=Device.cuda))
    answers = {units_key(config): shapes for config in (point.config, on_gpu)}
    memories = Memories(answers)
    (cpu, gpu) = (prediction._prediction(config, answers, memories, 80 * GIB) for config in (point.config, on_gpu))
    assert cpu is not None
    assert gpu is not None
    assert gpu.needed_bytes - cpu.needed_bytes == DeviceOverhead.on_cuda(4, 4).least > GIB
    assert "device_overhead" not in cpu.to_dict()


def test_without_counted_activations_a_point_needs_its_model_states() -> None:
    found = PointPrediction(STATES, None)
    assert (found.needed_bytes, found.ceiling_bytes, found.cannot_fit) == (3 * GIB, None, False)


@pytest.mark.full
def test_a_plan_shows_a_ranks_states_its_activations_and_its_total_need(cache: None, tmp_path: Path) -> None:
    found = points(f"{SIZES} output={tmp_path}")
    predicted = prediction.predictions(found)
    kept = {label: one.activations.kept for label, one in predicted.items() if one.activations}
    assert (
        kept["micro4-recompute_full"]
        < kept["micro2-recompute_none"]
        < kept["micro4-recompute_none"]
        < kept["micro8-recompute_none"]
    )
    for one in predicted.values():
        assert one.activations is not None
        assert one.ceiling_bytes is not None
        assert one.peak is not None
        assert one.states.total + one.activations.kept - one.states.grads <= one.needed_bytes == one.ceiling_bytes
    planned = decision.decide(found, tmp_path, lambda _: "cpu", Wishes(), predictor().predict(found))
    table = sweep_table.plan_table(planned)
    assert table.header == ("point", "decision", "params", "grads", "optimizer", "activations", "needs/rank")
    assert all("MiB" in cell for row in table.rows for cell in row[2:])


def test_a_point_that_exceeds_the_memory_lists_settings_that_would_fit(
    cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (point,) = points(f"{LARGE_BATCH} output={tmp_path}")
    (before,) = prediction.predictions([point]).values()
    monkeypatch.setattr(hardware, "memory_bytes", lambda: before.needed_bytes - 1)
    (found,) = prediction.predictions([point]).values()
    assert found.cannot_fit
    assert "batch.micro=4 batch.accumulation=2" in found.remedies
    assert "recompute=full" in found.remedies
    assert "zero=stage1" not in found.remedies  # a single rank has no other rank to shard over
    (planned,) = decision.decide([point], tmp_path, lambda _: "cpu", Wishes(), {point.label: found.brief()})
    assert "would fit: batch.micro=4" in planned.reason


def test_activations_that_cannot_be_counted_are_reported_with_the_reason_and_nothing_fails(
    cache: None, tmp_path: Path
) -> None:
    point = logits_scaled_after_the_head()
    (found,) = prediction.predictions([point]).values()
    assert found.activations is None
    assert "use loss=full" in found.unknown
    assert found.needed_bytes == found.states.total
    planned = decision.decide([point], tmp_path, lambda _: "cpu", Wishes(), {point.label: found.brief()})
    (row,) = [row for row in sweep_table.plan_rows(planned) if row[0] == "unknown"]
    assert row[1].startswith("activations of 1 point: ValueError: loss=tiled: expected CohereForCausalLM")


def test_a_run_and_a_plan_say_that_a_model_has_no_attention_of_torch(tmp_path: Path) -> None:
    (point,) = points("zero=stage1 resources.ranks=2")
    for attention, said in (("sdpa", ""), ("eager", prediction.EAGER)):
        found = PointPrediction(STATES, None, peak=LARGE, attention=prediction.attention_note({"attention": attention}))
        assert (prediction.EAGER in point_prediction.expected(found)) is bool(said)
        planned = decision.decide([point], tmp_path, lambda _: "cpu", Wishes(), {point.label: found.brief()})
        notes = [text for name, text in sweep_table.plan_rows(planned) if name == "note"]
        assert notes == [f"attention of 1 point: {said}"] * bool(said)


def test_the_cache_folder_is_private_to_the_user(cache: None) -> None:
    assert cache_file(memory_cache.folder(), "key").parent.stat().st_mode & 0o077 == 0


def test_a_cached_answer_that_was_corrupted_counts_as_missing(cache: None) -> None:
    memory_cache.store("key", {"state_bytes": 12345})
    assert memory_cache.stored("key") == {"state_bytes": 12345}
    file = cache_file(memory_cache.folder(), "key")
    file.write_text(file.read_text().replace("12345", "12346"))
    assert memory_cache.stored("key") is None


def test_lines_that_a_library_prints_are_not_taken_for_answers() -> None:
    assert counting_child._answer_in('["key", {"bytes": 1}]\n') == ("key", {"bytes": 1})
    for line in ("Loading weights: 100%\n", "[]\n", '"ab"\n', "3\n", '[["a"], {}]\n', '["key", null]\n', "[" * 99_999):
        assert counting_child._answer_in(line) is None


def test_without_a_cache_folder_answers_are_not_stored_and_nothing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    memory_cache.store("key", {"answer": 42})
    assert memory_cache.stored("key") is None


def test_a_model_that_cannot_be_built_is_refused_before_a_run_starts(
    cache: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*BOGUS.split(), f"output={tmp_path / 'out'}"]) == 2
    told = "error: 'model.config.bogus' is not a setting of this architecture; known: "
    assert capsys.readouterr().err.startswith(told)
    assert not (tmp_path / "out").exists()


def test_a_sweep_refuses_only_the_point_whose_model_is_wrong_and_says_why(
    cache: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*HEADS.split(), f"output={tmp_path}", "--plan", "--json"]) == 0
    shown = capsys.readouterr()
    refused, queued = json.loads(shown.out)
    assert (refused["decision"], queued["decision"]) == ("refused", "queued")
    assert refused["reason"].startswith("model.config is not a llama: ")
    assert f"refused: {refused['reason']}      (1 of 2 points)" in shown.err


def test_a_sweep_of_only_wrong_models_is_an_error_that_suggests_the_right_name(
    cache: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = [*MISSPELT.split(), f"output={tmp_path}"]
    assert cli.main(line) == 2
    assert "did you mean 'num_hidden_layers'?" in capsys.readouterr().err
    monkeypatch.setattr(sys, "executable", "/bin/false")  # the answer is cached: the second command needs no child
    with pytest.raises(Refusal, match="did you mean 'num_hidden_layers'"):
        api.sweep(*line)
    assert not list(tmp_path.glob("points/*"))


def test_shipped_models_are_checked_without_a_child_process(cache: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting_child, "start_process", lambda *_, **__: pytest.fail("a child was started"))
    assert prediction.problems(points("-m model=llama_tiny,gpt2 zero=stage1,stage3 resources.device=cpu")) == {}


def test_output_that_a_library_prints_in_the_child_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["welcome to a library", "[1]", "3", json.dumps(["key", {"a": 1}])]

    monkeypatch.setattr(counting_child, "start_process", process_of(f"print({chr(10).join(lines)!r})"))
    assert list(counting_child.Counting({"units": {}, "activations": []}).answers()) == [("key", {"a": 1})]


def process_of(code: str) -> Callable[..., subprocess.Popen[str]]:
    """Starts a process that runs this code in place of the one that counts."""

    def start(stderr: IO[bytes]) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", code]
        return subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, encoding="utf-8", errors="replace"
        )

    return start


@pytest.mark.parametrize(
    ("code", "within_s", "why"),
    [
        (
            "import os, sys; print('RuntimeError: no memory', 'frame #0', sep=chr(10), file=sys.stderr); os._exit(7)",
            math.inf,
            "the process that counts ended with exit code 7: RuntimeError: no memory",
        ),
        (
            "import os; os.write(2, b'what():  no\\n'); os.abort()",
            math.inf,
            "the process that counts ended with SIGABRT: what():  no",
        ),
        ("import time; time.sleep(60)", 0.5, "the counts took longer than the 0.5 s given"),
    ],
)
def test_a_count_that_fails_and_one_that_takes_too_long_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, within_s: float, why: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(counting_child, "start_process", process_of(code))
    unknown: dict[str, str] = {}
    point = points("zero=stage1 resources.device=cpu")[0]
    assert prediction.predictions([point], within_s=within_s, unknown=unknown) == {}
    assert unknown == {point.label: why}
    assert not list(tmp_path.rglob("*.json"))  # it may succeed next time


def test_the_plan_says_why_a_model_has_no_prediction(
    cache: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    why = "RuntimeError: can't allocate memory: you tried to allocate 1200000000000 bytes"

    def answers(units: Sequence[RunConfig], *_: object, **__: object) -> dict[str, object]:
        return {units_key(config): {"unknown": why, "passing": True} for config in units}

    monkeypatch.setattr(memory_cache, "answers", answers)
    line = ["-m", "zero=stage1,stage2", "data=synthetic", "resources.device=cpu", f"output={tmp_path}", "--plan"]
    assert cli.main(line) == 0
    assert f"unknown  the memory of 2 points: {why}\n" in capsys.readouterr().out


def test_any_failure_to_build_a_model_is_answered_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from orchestrator.wings.predict import shapes

    (point,) = points("zero=stage0")
    for error, told in (
        (RuntimeError("can't allocate memory"), {"unknown": "RuntimeError: can't allocate memory", "passing": True}),
        (ValueError("expected a\nfound b"), {"problem": "expected a; found b"}),
    ):
        monkeypatch.setattr(shapes, "units_of", Mock(side_effect=error))
        assert shapes._answer(point.config) == told
