"""Composition follows Hydra's sweep grammar, reads experiment and sweep files, and rejects unknown keys."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from orchestrator.compose import arguments, compose, folders, line
from orchestrator.compose.compose import ComposeError, OwnSource
from orchestrator.compose.composition import Composition
from orchestrator.compose.labels import sweep_name
from orchestrator.compose.settable import read_tree
from orchestrator.config.strict import Refusal
from orchestrator.machine.hardware import Hardware
from orchestrator.planning.points import checked_points
from orchestrator.planning.rules.scene import Scene
from orchestrator.wings.words.help_topics import Topics

LAPTOP = Scene(Hardware(cores=4, cpu="cpu"))


def composed(line: str) -> Composition:
    asked = arguments.split(line.split())
    assert not asked.problems
    return compose.compose(asked)


def labels(line: str) -> list[str]:
    points, problems = checked_points(composed(line), LAPTOP)
    assert problems == []
    return [point.label for point in points]


def test_a_single_point_combines_the_defaults_and_the_overrides() -> None:
    found = composed("zero=stage3 batch.micro=2")
    assert not found.is_sweep
    assert len(found.points) == 1
    assert found.points[0].values["zero"]["stage"] == 3
    assert found.points[0].values["batch"]["micro"] == 2
    assert found.points[0].choices["model"] == "llama_tiny"
    assert "hydra" not in found.points[0].values


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("zero=stage1 precision=fp32", ["stage1-fp32"]),
        ("model=gpt2 batch.micro=8 seed=3 tracking=none output=/x", ["stage2-bf16-gpt2-micro8-seed3"]),
        ("precision.reduce=bf16", ["stage2-bf16-reduce_bf16"]),
        ("zero=stage2 zero.stage=3 batch.micro=8", ["stage3-bf16-micro8"]),
        ("-m zero=stage0,stage1 precision=fp32", ["stage0", "stage1"]),
        (
            "-m recompute=none,full loss=full,tiled",
            [f"recompute_{a}-loss_{b}" for a in ("none", "full") for b in ("full", "tiled")],
        ),
        (f"data=text data.path={__file__}", ["stage2-bf16-data_text-path_test_compose.py"]),
        ("-m optimizer.lr=6.824e-05,0.001", ["lr6.824e-05", "lr0.001"]),
        ("-m optimizer.no_decay=true,false", ["no_decay_true", "no_decay_false"]),
        ("-m recompute.offload=none,cpu", ["recompute.offload_none", "recompute.offload_cpu"]),
        ("-m offload=none,optimizer_cpu optimizer=lion", ["offload_none", "offload_optimizer_cpu"]),
        ("zero=stage0,stage1 -m precision=fp32,bf16", ["stage0-fp32", "stage0-bf16", "stage1-fp32", "stage1-bf16"]),
        ("-m batch.micro=range(1,4)", ["micro1", "micro2", "micro3"]),
        ("-m zero=choice(stage2,stage3)", ["stage2", "stage3"]),
        ("-m zero=glob(*)", ["stage0", "stage1", "stage2", "stage3"]),
        ("-m zero=glob(*,exclude=stage0)", ["stage1", "stage2", "stage3"]),
        ("-m zero=stage0,stage0", ["stage0"]),
        ("-m zero=stage0", ["stage0-bf16"]),
        ("sweeps=stages zero=stage2", ["fp32", "bf16"]),
        ("-m sweeps=stages zero=stage2,stage3 precision=fp32", ["stage2", "stage3"]),
    ],
)
def test_labels_say_what_varies(line: str, expected: list[str]) -> None:
    assert labels(line) == expected


def test_a_sweep_file_needs_no_flag_and_gives_eight_points() -> None:
    found = composed("sweeps=stages")
    assert found.is_sweep
    assert found.axes == ("zero", "precision")
    assert len(found.points) == 8
    assert all("sweeps=stages" not in point.overrides for point in found.points)
    assert sweep_name(found.axes, ["sweeps=stages"]) == "stages"
    assert sweep_name(found.axes, ["zero=stage0,stage1"]) == "zero_precision"
    long = ["batch.micro", "model.config.hidden_size", "model.config.num_hidden_layers", "zero"]
    assert sweep_name(long, []) == "micro_hidden_size_num_hidden_layers_zero"
    assert sweep_name([*long, "precision"], []) == "micro_hidden_size_num_hidden_layers_zero"


def test_an_experiment_overrides_the_groups_and_the_command_line_overrides_both() -> None:
    assert composed("experiment=paper_bytes").points[0].values["precision"]["reduce"] == "bf16"
    assert composed("experiment=paper_bytes precision.reduce=fp32").points[0].values["precision"]["reduce"] == "fp32"


def test_experiments_can_be_swept(tmp_path: Path) -> None:
    folder = tmp_path / "experiment"
    folder.mkdir()
    for name, stage in (("one", 1), ("three", 3)):
        (folder / f"{name}.yaml").write_text(f"# @package _global_\ndefaults:\n  - override /zero: stage{stage}\n")
    found = composed(f"-m experiment=one,three --config-dir {tmp_path}")
    assert [point.values["zero"]["stage"] for point in found.points] == [1, 3]


def test_plus_and_plus_plus_work_where_hydra_permits_them() -> None:
    found = composed("+resources.ranks=3 ++zero.stage=1").points[0].values
    assert (found["resources"]["ranks"], found["zero"]["stage"]) == (3, 1)
    with pytest.raises(ComposeError, match="it is already there, so write"):
        composed("+zero.stage=1")


def test_plus_plus_cannot_add_an_unknown_key() -> None:
    points, problems = checked_points(composed("++zero.stagee=1"), LAPTOP)
    assert points == []
    assert problems == ["'zero.stagee' is not a setting. Did you mean 'zero.stage'?"]


def test_interpolations_are_resolved() -> None:
    assert composed("batch.micro=${measure.steps}").points[0].values["batch"]["micro"] == 25


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("batch=[1", "no viable alternative"),
        ("model.config.n_embd=3", "not a setting of the options chosen"),
        ("zero=stage1,stage2", "needs -m"),
        ("-m batch.micro=interval(1,2)", "an interval"),
        ("batch.micro=${nothing.there}", "nothing"),
        ("--config-name nope", "nope"),
    ],
)
def test_errors_of_hydra_are_one_line(line: str, told: str) -> None:
    with pytest.raises(ComposeError, match=told) as caught:
        composed(line)
    assert "\n" not in str(caught.value)
    assert "HYDRA_FULL_ERROR" not in str(caught.value)


@pytest.mark.parametrize("text", ["stage: [1\n", "a: b: c\n"])
def test_a_file_with_a_syntax_error_is_reported_in_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "zero").mkdir()
    (tmp_path / "zero" / "bad.yaml").write_text(text)
    with pytest.raises(ComposeError) as caught:
        composed(f"zero=bad --config-dir {tmp_path}")
    assert "\n" not in str(caught.value)
    assert "bad.yaml" in str(caught.value)


@pytest.mark.parametrize(("text", "told"), [("- stage\n", "zero must be a mapping"), ("stagee: 1\n", "'zero.stagee'")])
def test_an_option_file_of_the_wrong_shape_is_reported(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "zero").mkdir()
    (tmp_path / "zero" / "odd.yaml").write_text(text)
    points, problems = checked_points(composed(f"zero=odd --config-dir {tmp_path}"), LAPTOP)
    assert points == []
    assert told in problems[0]


DEEP = "a: " + 3000 * "[" + 3000 * "]"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"3.5\n", "expected a mapping of settings, found a single value"),
        (b"\xff\xfe\x00bad", "expected text in UTF-8, found the byte 0xff"),
        (b"a: &x\n  b: *x\n", "(expected settings in a few levels|YAML: YAML recursive aliases)"),  # OmegaConf 2.3, 2.4
        (DEEP.encode(), "expected settings in a few levels"),
    ],
)
@pytest.mark.parametrize(
    "line",
    [
        "sweeps=odd",
        *(
            pytest.param(line, marks=pytest.mark.full)
            for line in ("optimizer=odd", "experiment=odd", "model=odd", "-m optimizer=adamw,odd")
        ),
    ],
)
def test_a_file_without_valid_settings_is_reported_with_its_name_and_the_reason(
    content: bytes, told: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("conf/optimizer", "conf/experiment", "conf/model", "sweeps"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "odd.yaml").write_bytes(content)
    (tmp_path / "conf" / "adapter").mkdir()
    (tmp_path / "conf" / "adapter" / "also_odd.yaml").write_bytes(content)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ComposeError, match=rf"^\w+/odd\.yaml(, line 1)?: {told}") as caught:
        composed(line)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("word", ["model=pipe", "zero=pipe", "sweeps=pipe"])
def test_a_pipe_in_place_of_a_file_is_refused_without_reading_it(word: str, tmp_path: Path) -> None:
    group = word.partition("=")[0]
    (tmp_path / group).mkdir()
    os.mkfifo(tmp_path / group / "pipe.yaml")
    with pytest.raises(Refusal, match=rf"{group}/pipe"):
        line.composed(arguments.split([word, "--config-dir", str(tmp_path)]))


def test_a_broken_rule_reports_how_many_points_break_it() -> None:
    points, problems = checked_points(composed("-m batch.global_size=8,10,16 data=text"), LAPTOP)
    assert points == []
    assert len(problems) == 2
    assert any("(1 of 3 points)" in one for one in problems)
    assert any("(3 of 3 points)" in one for one in problems)


@pytest.mark.parametrize(
    ("line", "number"),
    [
        ("-m seed=range(1,1000000000)", "more in seed=range(1,1000000000)"),
        ("-m seed=shuffle(range(1,1000000000))", "more in seed=shuffle(range(1,1000000000))"),
        ("-m optimizer.lr=range(0,inf,0.5)", "more in optimizer.lr=range(0,inf,0.5)"),
        ("-m seed=range(0,1000) batch.micro=range(1,2000) batch.seq=1,2", "3,998,000 (1,000 of seed x 1,999 of"),
        ("sweeps=stages seed=range(0,9000)", "72,000 ("),
    ],
)
def test_a_huge_product_is_refused_before_it_is_expanded(line: str, number: str) -> None:
    with pytest.raises(ComposeError, match=re.escape(f"expected a sweep of at most 10,000 points, found {number}")):
        composed(line)


def test_max_points_sets_the_limit_on_the_points_of_a_sweep() -> None:
    assert len(composed("-m seed=1,2,3 --max-points 3").points) == 3
    with pytest.raises(ComposeError, match=r"at most 2 points, found 3 .*--max-points N"):
        composed("-m seed=1,2,3 --max-points 2")
    asked = arguments.split(["-m", "--max-points", "many", "seed=1,2"])
    assert asked.problems == ["--max-points cannot be 'many': a whole number of points"]
    asked = arguments.split(["-m", "--max-points=20000", "seed=1,2"])
    assert (asked.max_points, asked.command()) == (20000, ["--multirun", "--max-points", "20000", "seed=1,2"])


def test_a_file_gets_the_keys_that_it_leaves_out_unless_it_changes_another_file(tmp_path: Path) -> None:
    (tmp_path / "zero").mkdir()
    (tmp_path / "zero" / "alone.yaml").write_text("prefetch: 2\n")
    (tmp_path / "zero" / "both.yaml").write_text("defaults: [stage3, change]\n")
    (tmp_path / "zero" / "change.yaml").write_text("prefetch: 2\n")
    source = OwnSource("test", f"{OwnSource.scheme()}://{tmp_path}")
    assert source.load_config("zero/alone").config["stage"] == 2
    assert set(source.load_config("zero/both").config) == {"defaults"}
    assert source.load_config("zero/change").config == {"prefetch": 2}, "it would reset the stage of the file before it"


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with an option, a sweep and a primary file that have names of shipped ones."""
    for place in ("conf/zero", "mine/zero", "mine/sweeps", "sweeps"):
        tmp_path.joinpath(place).mkdir(parents=True)
    tmp_path.joinpath("conf", "zero", "stage2.yaml").write_text("stage: 0\n")
    tmp_path.joinpath("conf", "config.yaml").write_text("defaults: [_self_, {model: resnet}]\nepochs: 3\n")
    tmp_path.joinpath("mine", "zero", "stage2.yaml").write_text("stage: 1\n")
    tmp_path.joinpath("mine", "sweeps", "stages.yaml").write_text("axes: {seed: [7]}\n")
    tmp_path.joinpath("sweeps", "stages.yaml").write_text("axes: {zero: [stage2]}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("words", "stages"),
    [
        ("zero=stage2", [0]),
        ("seed=1", [0]),
        ("-m zero=stage1,stage2", [1, 0]),
        ("experiment=paper_bytes", [0]),
        ("+resources.ranks=3", [0]),
        ("sweeps=stages", [0]),
        ("zero=stage2 --config-dir mine", [1]),
        ("experiment=paper_bytes --config-dir mine", [1]),
        ("sweeps=stages --config-dir mine", [1]),
        ("zero=stage2 --config-dir conf", [0]),
    ],
)
def test_a_file_of_the_users_own_is_used_in_place_of_a_shipped_one_and_said(
    words: str, stages: list[int], own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line._note.cache_clear()
    found = line.composed(arguments.split(words.split()))
    assert [point.values["zero"]["stage"] for point in found.points] == stages
    told = capsys.readouterr().err
    assert told.startswith("note: used in place of other files of the same name: ")
    assert "note: conf/config.yaml is not used: give it another name" in told
    assert composed(words).points == found.points


def test_hydras_listings_and_the_help_show_the_file_that_is_used(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for added, stage in ((None, 0), ("mine", 1)):
        asked = arguments.split(["zero=stage2", "--cfg", "job", *(["--config-dir", added] if added else [])])
        with pytest.raises(SystemExit):
            compose.show(asked)
        assert f"zero:\n  stage: {stage}\n" in capsys.readouterr().out
        assert f"zero.stage={stage}" in Topics(read_tree(added), added).page(["zero=stage2"])


def test_equal_copies_of_shipped_files_are_not_worth_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(folders.CONF, tmp_path / "conf")
    shutil.copytree(folders.SHIPPED / "sweeps", tmp_path / "sweeps")
    monkeypatch.chdir(tmp_path)
    assert folders.replacing(None) == []
