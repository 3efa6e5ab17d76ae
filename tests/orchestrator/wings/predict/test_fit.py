"""`zlab fit` prints what fits onto GPUs that are not here. One child process counts for all tests of this file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from harness.warm_shapes import WarmShapes

from orchestrator import cli
from orchestrator.planning.point import Point
from orchestrator.wings.predict import counting_child, fit_arithmetic, memory_cache
from orchestrator.wings.predict import fit as command
from orchestrator.wings.predict.fit_rows import Fit
from zero_runtime.predict.memory.activation_count import LinearTrace

LINE = ("model=llama_tiny", "hardware=a10", "hardware.gpus=4", "recompute=none,full", "loss=full")
TWO = (*LINE, "resources.ranks=2")
# 1.2 GiB for a rank, of which CUDA's context and cuBLAS take at most 0.7 GiB if the rank is the only one.
SMALL = (*LINE, "resources.ranks=1", "hardware.memory_mib=1200")
PRICED = ("hardware.price_per_hour=1.5", "hardware.currency=USD")
HIGHEST = command.TRACED_TOKENS // 128


class Answer(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the answers for LINE, which do not depend on the ranks, the stage or the hardware."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setattr(counting_child, "start_process", WarmShapes)
        assert cli.main(["fit", *TWO, "--json"]) == 0
    return folder


@pytest.fixture(autouse=True)
def from_the_cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_child(stderr: object) -> None:
        raise AssertionError("a child process was started")

    if "counted" in request.fixturenames:
        monkeypatch.setenv("XDG_CACHE_HOME", str(request.getfixturevalue("counted")))
    monkeypatch.setattr(counting_child, "start_process", no_child)
    monkeypatch.setattr(counting_child, "started_ahead", lambda needed: nullcontext())  # no child before it is needed


class Say:
    """Calls the command and returns what it printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: str) -> Answer:
        code = cli.main(["fit", *words])
        return Answer(code, *self._capsys.readouterr())

    def json(self, *words: str) -> list[dict[str, Any]]:
        found = json.loads(self(*words, "--json").out)
        assert found["model"]
        assert all(row["machine"] for row in found["rows"])
        rows: list[dict[str, Any]] = found["rows"]
        return rows


@pytest.fixture
def say(counted: Path, capsys: pytest.CaptureFixture[str]) -> Say:
    capsys.readouterr()
    return Say(capsys)


def test_the_table_shows_the_best_rows_and_counts_the_others(say: Say) -> None:
    code, out, err = say(*TWO)
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines() if line.startswith("stage")]
    assert [row[:2] for row in rows] == [["stage1", f"{HIGHEST}+"]]  # it fits all there is, and sends the least
    assert "\nhidden  17 rows: no larger batch and no less work than a row above (--all)\n" in out
    assert "plan " in out
    assert "--explain stage1" in out
    assert "\nlength   128 tokens are the default; for your own length: batch.seq=" in out
    assert "tokens are the default" not in say(*TWO, "batch.seq=128").out
    assert f"\ntake     stage1, micro-batch {HIGHEST}, " in out
    assert f"\nsecond   stage2, micro-batch {HIGHEST}, " in out
    assert out.count("so the row with the least extra work wins\n") == 1


def test_all_rows_are_shown_on_request_with_labels_that_differ(say: Say) -> None:
    _, out, _ = say(*TWO, "--all")
    labels = [line.split()[0] for line in out.splitlines() if line.startswith("stage")]
    # 4 stages x 2 x recompute, each in GPU memory and with offload of the optimizer; parameters in stage 3 alone
    assert len(labels) == len(set(labels)) == 18
    assert {"stage0", "stage3-full", "stage3-optimizer_param_cpu-full"} <= set(labels)
    words = re.findall(r"^(by_operation|full|tiled|sent) ", out, re.MULTILINE)
    assert words == ["full", "sent"]  # those of these rows alone
    assert "\nhidden " not in out


def test_a_larger_limit_fits_a_larger_micro_batch_and_the_next_one_exceeds_it(say: Say) -> None:
    micros = []
    for mib in (1000, 1200, 1400):
        (one,) = [row for row in say.json(*SMALL, f"hardware.memory_mib={mib}") if row["label"] == "stage0"]
        assert one["used_bytes_most"] <= one["limit_bytes"] == mib << 20
        micros.append(one["micro"])
    assert 0 < micros[0] < micros[1] < micros[2] < HIGHEST


def test_where_nothing_fits_the_nearest_row_is_named_with_its_reason(say: Say) -> None:
    code, out, _ = say(*LINE, "resources.ranks=1", "hardware.memory_mib=500")
    assert code == 1
    assert re.search("do not fit .*: micro-batch 1 uses up to .* of 500 MiB", out)
    assert "--explain stage3-optimizer_param_cpu-full" in out  # it takes the least
    assert re.search(r"^less .* adapter=lora precision.weights=int4  ", out, re.MULTILINE)
    assert "plan " not in out


def test_rows_that_do_not_fit_are_shown_on_request_at_a_micro_batch_of_one(say: Say) -> None:
    code, out, err = say(*LINE, "resources.ranks=1", "hardware.memory_mib=500", "--all")
    assert (code, err) == (1, "")
    assert "at the largest micro-batch that fits, or at 1" in out
    rows = [line.split() for line in out.splitlines() if line.startswith("stage")]
    assert len(rows) == 18
    assert {row[1] for row in rows} == {"-"}
    assert {row[2] for row in rows} == {"perhaps"}
    assert "\nfits perhaps  if CUDA, cuBLAS and NCCL take the least of their range\n" in out


def test_offload_that_exceeds_the_host_s_memory_does_not_fit(say: Say) -> None:
    rows = say.json(*TWO, "hardware.host_memory_gib=0.03")
    lacking = {row["label"]: row["reason"] for row in rows if "host memory" in row["reason"]}
    assert "stage0-optimizer_cpu" in lacking
    assert "keeps 2 x " in lacking["stage0-optimizer_cpu"]
    assert all(not row["micro"] for row in rows if row["label"] in lacking)
    assert "stage0" not in lacking
    asked = say(*TWO, "zero=stage1", "offload=optimizer_cpu", "recompute=full").out  # of the a10 it is not known
    assert re.search(r"of host memory for 2 ranks: hardware.host_memory_gib is not known      fix: ", asked)
    assert "not known" not in say(*TWO, "offload=optimizer_cpu", "hardware.host_memory_gib=64").out


def test_rows_that_cannot_be_counted_are_reported_with_the_reason(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = command.answers_for

    def without_full(points: Sequence[Point], *, quiet: bool) -> dict[str, Mapping[str, Any]]:
        answers = counted(points, quiet=quiet)
        for config in command._traced_for([one for one in points if one.config.recompute.kind == "full"]):
            answers.pop(answers[memory_cache.activations_key(config)]["trace"], None)
            answers[memory_cache.activations_key(config)] = {"unknown": "ValueError: no"}
        return answers

    monkeypatch.setattr(command, "answers_for", without_full)
    code, out, err = say(*TWO, "--all")
    assert code == 3
    assert len([line for line in out.splitlines() if line.startswith("stage")]) == 9
    told = "warning: 9 of 18 rows left out, the activations cannot be counted: ValueError: no      rows: stage0-full "
    assert err.startswith(told)
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("label", ["stage0", "stage1", "stage2", "stage3-full", "stage3-optimizer_param_cpu"])
def test_the_arithmetic_adds_up_to_the_peak_and_states_equal_their_closed_form(counted: Path, label: str) -> None:
    (one,) = [row for row in command.fits_of(command._points(TWO, None), quiet=True) if row.label == label]
    parts = fit_arithmetic.walk(one)
    assert sum(part.counted for part in parts) == one.peak.total
    for part in parts[:2]:  # parameters and the optimizer's states exist for the complete step
        assert part.expected == part.counted


def test_explain_shows_the_closed_forms_with_numbers(say: Say) -> None:
    code, out, _ = say(*TWO, "--explain", "stage1-full")
    assert code == 0
    assert "Ψ = 1,869,504" in out
    assert "2Ψ = 2 x 1.87 M" in out
    assert "12Ψ/N = 12 x 1.87 M / 2" in out
    assert "recompute=full" in out
    assert re.search(r"^reserved +[\d.]+ \w+ by torch's allocator with expandable segments", out, re.MULTILINE)
    offloaded = say(*TWO, "--explain", "stage1-optimizer_cpu").out
    assert "/ 2, offloaded" in offloaded
    assert "2 ranks of a node" in offloaded


def test_the_proposed_commands_keep_the_folder_of_options(say: Say, tmp_path: Path) -> None:
    (tmp_path / "hardware").mkdir()
    (tmp_path / "hardware" / "mine.yaml").write_text("name: mine\ngpus: 2\nmemory_mib: 8000\n")
    words = ("model=llama_tiny", "hardware=mine", "recompute=none,full", "loss=full")
    code, out, err = say("-cd", str(tmp_path), *words)
    assert (code, err) == (0, "")
    proposed = [line for line in out.splitlines() if line.startswith(("explain ", "plan "))]
    assert len(proposed) == 2
    assert all(f" --config-dir {tmp_path} " in line for line in proposed)


def test_a_table_has_a_column_for_each_number_of_ranks_on_as_many_nodes_as_they_need(say: Say) -> None:
    code, out, _ = say(*LINE, "--table", "ranks=1,2,8")
    assert code == 0
    assert [line.split() for line in out.splitlines() if line.startswith("row ")] == [["row", "1", "2", "8"]]
    (line,) = [line for line in out.splitlines() if line.startswith("explain ")]
    words = line.partition(" fit ")[2].split()  # what it proposes works when pasted
    assert "--explain" in words
    assert say(*words).code == 0
    rows = say.json(*LINE, "--table", "ranks=1,2,8")
    assert {row["ranks"] for row in rows} == {1, 2, 8}
    assert any("resources.nodes=2" in row["overrides"] for row in rows)  # of 4 GPUs each


@pytest.mark.full
def test_a_table_has_a_column_for_each_number_of_slices_and_of_parts(monkeypatch: pytest.MonkeyPatch, say: Say) -> None:
    monkeypatch.setattr(counting_child, "start_process", WarmShapes)  # slices are counted for this table alone
    line = (*LINE, "offload=none", "resources.ranks=4", "--table")
    assert "by the ranks that hold parts of one sequence (parallel.sp)" in say(*line, "sp=1,2", "zero=stage3").out
    sliced = {row["label"]: row for row in say.json(*line, "tp=1,2", "zero=stage1,stage3")}
    parted = {row["label"]: row for row in say.json(*line, "sp=1,2", "zero=stage3")}
    assert {row["tp"] for row in sliced.values()} == {row["sp"] for row in parted.values()} == {1, 2}
    states = {label: row["peak_parts_bytes"]["parameters"] for label, row in sliced.items()}
    assert states["stage1-tp2"] < states["stage1-tp1"] < 2 * states["stage1-tp2"]  # norms are replicated
    kept = {label: row["peak_parts_bytes"]["blocks"] / row["micro"] for label, row in parted.items()}
    assert kept["stage3-sp2"] < 0.6 * kept["stage3-sp1"]  # of a sequence; each rank has half of it


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((*TWO, "--explain", "stage1-ful"), "there is no row 'stage1-ful'. Did you mean 'stage1-full'?"),
        ((*TWO, "batch.micro=4", "--table", "tp=1,2"), "--table shows the largest micro-batch"),
        ((*TWO, "batch.global_size=64"), "batch.global_size: it varies with the micro-batch"),
        (
            (*TWO, "--table", "ranks=0"),
            "--table: expected numbers of ranks, of parallel.tp or of parallel.sp, found 'ranks=0'",
        ),
        ((*TWO, "--table", "ranks=1,2"), "--table varies resources.ranks"),
        ((*TWO, "parallel=tp2", "--table", "tp=1,2"), "--table varies parallel.tp"),
        ((*TWO, "parallel.sp=2", "--table", "sp=1,2"), "--table varies parallel.sp"),
        ((*TWO, "--detach"), "fit starts no run and has no --detach"),
        ((*TWO, "--tabel"), "there is no flag '--tabel'"),
        (("model=llama_tiny", "hardware=a100"), "hardware has no option 'a100', found a100_40gb and a100_80gb"),
        (("hardware=a10,3xrtx_9090",), "hardware has no option 'rtx_9090'"),
        (("hardware=a10,t4", "--table", "ranks=1,2"), "--table is of one machine"),
        ((*TWO, "train.tokens=many"), "train.tokens: expected a number above 0, found 'many'"),
        ((*TWO, "train.tokens=5e6", "train.epochs=1"), "train.tokens and train.epochs are two lengths"),
        ((*TWO, "train.epochs=1", "data=pairs", "data.path=/no/such"), "data.path"),
        (("model=lama_tiny", "hardware=a10"), "model has no option 'lama_tiny'"),
        (("resources.device=cuda",), "resources.device=cuda: no GPU is here"),
        (("model=/no/such/folder", "hardware=a10"), "model.path must be a folder that is there"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_one_line(say: Say, words: tuple[str, ...], problem: str) -> None:
    code, out, err = say(*words)
    assert (code, out) == (2, "")
    assert f"error: {problem}" in err
    assert len(err.splitlines()) == 2  # and that nothing was started


def test_machines_are_compared_in_one_table_with_the_hours_and_money_of_a_job(say: Say) -> None:
    machines = ("hardware=2xa100_80gb,rtx_4090,2xh100", "hardware.price_per_hour=1.5", "hardware.currency=USD")
    line = ("model=llama_tiny", *machines, *LINE[3:], "zero=stage1", "train.tokens=1e9")
    code, out, err = say(*line)
    assert (code, err) == (0, "")
    assert [line.split()[1] for line in out.splitlines() if line.startswith("machine ")] == [
        *("a100_80gb:", "rtx_4090:", "h100_80gb:")
    ]
    takes = {line.split()[1].rstrip(","): line for line in out.splitlines() if line.startswith("take ")}
    assert {label.rpartition("-")[2] for label in takes} == {"2xa100_80gb", "2xh100", "rtx_4090"}
    a100, gpu = (next(line for label, line in takes.items() if name in label) for name in ("2xa100_80gb", "rtx_4090"))
    least, most = (float(one.replace(",", "")) for one in re.findall(r"~([\d,]+)-([\d,]+) tokens/s", a100)[0])
    hours = [float(one) for one in re.findall(r" ([\d.]+)-([\d.]+) h, ", a100)[0]]
    # Ends of two digits: each is at most 5 % off, and so is what is computed here from those of the speed.
    assert hours == pytest.approx([1e9 / most / 3600, 1e9 / least / 3600], rel=0.1)
    money = [float(one) for one in re.findall(r"h, ([\d.]+)-([\d.]+) USD", a100)[0]]
    assert money == pytest.approx([2 * 1.5 * one for one in hours], rel=0.1)
    assert "hours are not known" in gpu
    assert "\ndecided  stage1" in out
    # A tokenizer counts what it makes of data; bytes are counted here.
    (tokens,) = re.findall(r"^job +([\d.]+) M tokens are", say(*TWO, "train.epochs=2").out, re.MULTILINE)
    (half,) = re.findall(r"^job +([\d.]+) M tokens are", say(*TWO, "train.epochs=1").out, re.MULTILINE)
    assert float(tokens) == pytest.approx(2 * float(half), abs=0.01)


def test_rows_that_another_engine_s_rules_do_not_know_are_counted(monkeypatch: pytest.MonkeyPatch, say: Say) -> None:
    monkeypatch.setattr(counting_child, "start_process", WarmShapes)  # stage 0 is in autocast there, and not here
    code, out, _ = say(*TWO, "--as", "deepspeed")
    assert code == 0
    assert len([line for line in out.splitlines() if line.startswith("stage")]) == 16
    assert "\nleft out  2 of 18 rows\n" in out
    assert "the rules of deepspeed shard at these settings, found zero=stage0      fix: zero=stage1\n" in out


def test_a_given_micro_batch_is_answered_with_its_bytes(monkeypatch: pytest.MonkeyPatch, say: Say) -> None:
    monkeypatch.setattr(counting_child, "start_process", WarmShapes)  # the others count other micro-batches
    fixed = (*LINE[:3], "recompute=none", "loss=full", "resources.ranks=2", "offload=none", "batch.micro=3")
    line = (*fixed, "zero=stage1,stage3")
    code, out, _ = say(*line)
    assert code == 0
    assert "at the given micro-batch" in out
    rows = [one.split() for one in out.splitlines() if one.startswith("stage")]
    assert [row[:3] for row in rows] == [["stage1", "3", "yes"], ["stage3", "3", "yes"]]  # none is left out
    first, _ = say.json(*line)
    assert first["resting_bytes"] < first["peak_bytes"] <= first["reserved_bytes"]
    limit = first["used_bytes_most"] / 2**20
    tensors = limit - (first["reserved_bytes"] - first["peak_bytes"]) / 2**20
    for mib, verdict in ((limit + 1, "yes"), (limit - 1, "tight"), (tensors + 1, "tight"), (tensors - 1, "perhaps")):
        row = re.search(r"^stage1 +3 +(\w+)", say(*line, f"hardware.memory_mib={mib:.0f}").out, re.MULTILINE)
        assert row is not None
        assert row[1] == verdict
    for engine in ("deepspeed", "fsdp2"):
        (found,) = say.json(*fixed, "zero=stage1", "--as", engine)
        assert found["micro"] == found["micro_counted"] == 3
        assert found["fits"] == "yes"
        assert found["resting_bytes"] <= found["peak_bytes"] <= found["reserved_bytes"]
        told = say(*line, "--as", engine, "--explain", "stage1").out
        both = r"^reserved +[\d.]+ \w+ by torch's allocator; [\d.]+ \w+ with PYTORCH_ALLOC"
        assert re.search(both, told, re.MULTILINE)


def test_a_second_question_reads_no_trace(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    first = say(*TWO, "--all")

    def read(data: object) -> LinearTrace:
        raise AssertionError("a trace was read")

    monkeypatch.setattr(LinearTrace, "of_plain", read)
    assert say(*TWO, "--all") == first
    assert say.json(*TWO)


def test_what_the_allocator_reserves_is_a_column_for_gpus_and_none_for_cpu_ranks(say: Say) -> None:
    header, row = [line.split() for line in say(*TWO).out.splitlines() if line.startswith(("row", "stage"))]
    peak, reserved = (float(row[header.index(name)]) for name in ("peak", "reserved"))
    assert peak <= reserved < 1.2 * peak
    explained = say(*TWO, "--explain", row[0]).out
    assert f"reserved   {row[header.index('reserved')]} " in explained


def test_one_row_also_shows_what_building_saving_and_exporting_take(say: Say) -> None:
    out = say(*TWO, "--explain", "stage3").out
    for moment in (
        "drawing initial values",
        "loading a state",
        "saving a state",
        "exporting weights",
        "export-weights",
    ):
        assert f"\n{moment} " in out
    (row,) = [one for one in say.json(*TWO) if one["label"] == "stage3"]
    # A state is half of the parameters and of two moments, in fp32; what is bf16 has an fp32 master.
    assert row["outside_step_bytes"]["saving a state"]["host"] == 3 * 4 * 1_869_504 // 2
    tight = say(*TWO, "hardware.memory_mib=40", "hardware.host_memory_gib=0.01", "--explain", "stage3").out
    assert "kept for the next save; more than 40.0 MiB; more than the node's 10" in tight
    away = next(one for one in say.json(*TWO) if one["label"] == "stage3-optimizer_cpu")
    assert all(moment["host"] >= away["host_bytes_per_rank"] for moment in _of_ranks(away["outside_step_bytes"]))


def _of_ranks(moments: dict[str, dict[str, int]]) -> list[dict[str, int]]:
    assert moments["export-weights"]["device"] == 0  # one process, without ranks
    return [moment for name, moment in moments.items() if name != "export-weights"]


@pytest.mark.parametrize("verb", ["fit", "choose", "calibrate"])
def test_an_evaluation_is_refused_with_one_error(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([verb, "model=llama_tiny", "measure=eval", "resources.device=cpu"]) == 2
    told = capsys.readouterr()
    errors = [line for line in told.err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert "steps of training, and measure=eval has none      fix: measure=quick" in errors[0]
    assert told.out == ""


def test_a_price_adds_the_cost_of_a_billion_tokens_at_the_estimated_speed(say: Say, counted: Path) -> None:
    line = [word.replace("a10", "a100_80gb") for word in TWO]
    priced = say(*line, *PRICED).out.splitlines()
    header = next(line for line in priced if "USD/1B tokens" in line)
    assert re.search(r"tokens/s +MFU +USD/1B tokens", header)
    row = priced[priced.index(header) + 1].split()
    least, most = (float(cell.replace(",", "")) for cell in row[3].removeprefix("~").split("-"))
    mfu, cost = int(row[4]) / 100, float(row[6].removeprefix("~").replace(",", ""))
    # Two digits of each end are shown: at most half of the last one, 5 %, is lost.
    assert mfu == pytest.approx(6 * 1_869_504 * (least + most) / 2 / (2 * 312e12), abs=0.005 + 0.05)
    (known,) = [one for one in say.json(*line, *PRICED) if one["label"] == row[0]]
    assert known["predicted"]["tokens_per_second_within"] == pytest.approx([least, most], rel=0.05)
    assert (known["predicted"]["mfu"], known["cost_per_billion_tokens"]) == pytest.approx((mfu, cost), rel=0.06)
    found = json.loads(say(*line, *PRICED, "train.tokens=1e9", "--json").out)
    (taken,) = found["take"]
    assert (taken["label"], taken["micro"], taken["second"]) == (row[0], HIGHEST, "stage2")
    assert (taken["job"].endswith(" USD"), known["currency"], found["enough_ranks"]) == (True, "USD", {})
    assert row[6].startswith("~")
    dearest, cheapest = (2 * 1.5 * 1e9 / (3600 * speed) for speed in (least, most))
    assert cheapest < cost < dearest
    assert "1B tokens" not in say(*line).out


def test_two_gpus_over_pcie_show_no_speed_and_no_cost(say: Say) -> None:
    out = say(*TWO, "hardware.price_per_hour=1.5", "hardware.currency=USD").out
    assert "\noutside: no published run with PCIe-only GPUs to base a speed on\n" in out
    assert "1B tokens" not in out
    assert "~" not in out


def test_an_offload_that_is_not_needed_is_named_if_it_is_given(say: Say) -> None:
    """Other lines have the rows without it."""
    words = (*TWO, "zero=stage3", "offload=optimizer_param_cpu", "recompute=full")
    (one,) = say.json(*words)
    assert re.fullmatch(rf"micro-batch 1 uses .* of .* without it, and up to {HIGHEST} fit", one["offload_needless"])
    assert "the offload of stage3 is not needed: micro-batch 1" in say(*words).out
    assert "not needed" in say(*words, "--explain", "stage3").out
    assert all(row["offload_needless"] == "" for row in say.json(*TWO))


def test_choose_orders_by_size_and_walks_on_to_drives(
    say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [word.replace("a10", "a100_80gb") for word in (*TWO, f"output={tmp_path}")]

    def chosen(*words: str) -> dict[str, Any]:
        assert cli.main(["choose", *line, *words, "--json"]) == 0
        return dict(json.loads(capsys.readouterr().out))

    smallest, fastest = chosen("--order", "smallest"), chosen()
    assert (smallest["order"], fastest["order"]) == ("smallest", "fastest")
    assert "optimizer_cpu-micro1" in smallest["chosen"]
    assert "cpu" not in fastest["chosen"]  # the offload is off again where memory suffices
    # Nothing is known of the speed with an offload on this card: the row with the least to do is the answer.
    small = (*TWO, "zero=stage1,stage3", "offload=optimizer_cpu", f"output={tmp_path}")
    assert cli.main(["choose", *small]) == 0
    told = capsys.readouterr().out
    assert re.search(r"^take +stage1, micro-batch ", told, re.MULTILINE)
    assert (
        "no speed is known here (the data sheet lacks hardware.host_memory_gb_per_s), so the row with the least extra "
        "work wins; no run has confirmed it" in told
    )
    assert re.search(r"^measure .* choose model=llama_tiny recompute=none,full loss=full resources", told, re.MULTILINE)
    fits_of = command.fits_of

    def only_on_drives(points: Sequence[Point], *, quiet: bool) -> list[Fit]:
        fits = fits_of(points, quiet=quiet)
        return [one if one.config.offload.uses_nvme else replace(one, micro=0) for one in fits]

    monkeypatch.setattr(command, "fits_of", only_on_drives)
    assert "nvme" in chosen()["chosen"]
