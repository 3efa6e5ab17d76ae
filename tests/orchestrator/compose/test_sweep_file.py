"""A sweep file expands to the points that a user could have typed on the command line."""

from __future__ import annotations

import time
from itertools import combinations
from pathlib import Path

import pytest
import yaml

from orchestrator.compose import arguments, compose, folders, sweep_file
from orchestrator.compose.point_count import TooManyPoints
from orchestrator.compose.sweep_file import SweepFile, SweepFileError, expand, spelled
from orchestrator.config.schema import to_dict
from orchestrator.machine.hardware import Hardware
from orchestrator.planning.point import Point
from orchestrator.planning.points import checked_points
from orchestrator.planning.rules.scene import Scene
from orchestrator.records.run_record import point_id

LAPTOP = Scene(Hardware(cores=4, cpu="cpu"))


def lines(sweep: SweepFile, **typed: list[str]) -> list[str]:
    return [" ".join(line.values()) for line in expand(sweep, typed).lines]


def test_axes_form_a_product_and_the_base_is_in_every_point() -> None:
    sweep = SweepFile(base={"model": "gpt2"}, axes={"zero": ["stage0", "stage1"], "batch.micro": [1, 2]})
    assert lines(sweep) == [
        "model=gpt2 zero=stage0 batch.micro=1",
        "model=gpt2 zero=stage0 batch.micro=2",
        "model=gpt2 zero=stage1 batch.micro=1",
        "model=gpt2 zero=stage1 batch.micro=2",
    ]
    assert expand(sweep, {}).axes == ("zero", "batch.micro")


def test_zipped_lists_advance_together() -> None:
    sweep = SweepFile(zip=[{"batch.micro": [1, 2], "batch.accumulation": [2, 1]}], seeds=[1, 2])
    assert lines(sweep) == [
        "batch.micro=1 batch.accumulation=2 seed=1",
        "batch.micro=1 batch.accumulation=2 seed=2",
        "batch.micro=2 batch.accumulation=1 seed=1",
        "batch.micro=2 batch.accumulation=1 seed=2",
    ]


def test_exclude_drops_points_and_concat_adds_points() -> None:
    sweep = SweepFile(
        axes={"zero": ["stage0", "stage3"], "offload": ["none", "optimizer_cpu"]},
        exclude=[{"zero": "stage0", "offload": ["optimizer_cpu", "param_cpu"]}],
        concat=[{"zero": "stage3", "offload": "optimizer_nvme"}],
    )
    assert lines(sweep) == [
        "zero=stage0 offload=none",
        "zero=stage3 offload=none",
        "zero=stage3 offload=optimizer_cpu",
        "zero=stage3 offload=optimizer_nvme",
    ]


def test_a_concat_point_is_labelled_by_its_own_keys(tmp_path: Path) -> None:
    (tmp_path / "sweeps").mkdir()
    text = "axes: {zero: [stage0, stage1]}\nconcat: [{zero: stage3, batch.micro: 2}, {seed: 7}]"
    (tmp_path / "sweeps" / "mine.yaml").write_text(text)
    found = compose.compose(arguments.split(["sweeps=mine", "--config-dir", str(tmp_path)]))
    points, problems = checked_points(found, LAPTOP)
    assert problems == []
    assert [point.label for point in points] == ["stage0", "stage1", "stage3-micro2", "seed7"]


def test_when_sets_resources_of_some_points_without_adding_an_axis() -> None:
    rule = {"if": {"zero": "stage3"}, "set": {"resources.ranks": 4}}
    sweep = SweepFile(axes={"zero": ["stage2", "stage3"]}, when=[rule])
    assert lines(sweep) == ["zero=stage2", "zero=stage3 resources.ranks=4"]
    assert expand(sweep, {}).axes == ("zero",)
    assert lines(sweep, **{"resources.ranks": ["resources.ranks=1"]})[1] == "zero=stage3 resources.ranks=1"


def test_typed_settings_override_the_file_and_a_typed_list_is_an_axis() -> None:
    sweep = SweepFile(base={"model": "gpt2"}, axes={"zero": ["stage0", "stage1"]}, concat=[{"zero": "stage3"}])
    assert lines(sweep, model=["model=llama_1b"])[0] == "model=llama_1b zero=stage0".replace(
        "model=llama_1b zero=stage0", "zero=stage0 model=llama_1b"
    )
    assert lines(sweep, zero=["zero=stage2"]) == ["model=gpt2 zero=stage2"] * 2
    assert len(lines(sweep, seed=["seed=1", "seed=2"])) == 2 * 2 + 1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("stage1", "stage1"),
        ("1e-4", "'1e-4'"),
        (1e-4, "0.0001"),
        (None, "null"),
        (True, "true"),
        ("true", "'true'"),
        (["a b", 1], "['a b',1]"),
        ("it's, so", "'it\\'s, so'"),
        ({"a": 1}, "{a:1}"),
    ],
)
def test_values_are_spelled_in_hydras_grammar(value: object, text: str) -> None:
    assert spelled(value) == text


def parser_says(text: str) -> str:
    """The line and the rule that the installed parser names: libyaml, which OmegaConf 2.4 takes, counts to the end."""
    with pytest.raises(yaml.MarkedYAMLError) as caught:
        compose.OmegaConf.create(text)
    assert caught.value.problem_mark
    return f"line {caught.value.problem_mark.line + 1}: {caught.value.context}: {caught.value.problem}"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("axis: {zero: [stage0]}", "'axis' is not a key; did you mean 'axes'"),
        ("axes: {zero: stage0}", "axes: expected a mapping of keys to lists"),
        ("zip: [{a: [1, 2], b: [1]}]", "lists of one length"),
        ("base: {zero: stage0}", "expected one of axes, zip, concat and seeds"),
        ("when: [{if: {}}]\naxes: {a: [1]}", "when: expected a list of"),
        ("- a", "expected a mapping, found list"),
        ("a: [", parser_says("a: [")),
        ("axes:\n  zero: [stage1]\n  zero: [stage3]", "sweeps/mine.yaml, line 3: 'zero' occurs twice"),
        ("zero: [stage1]", "settings belong under axes: or base:"),
        ("axes: {zero: 'stage0,stage1'}", "write zero: [stage0, stage1]"),
        ("seeds: [a]", "seeds: expected a list of whole numbers"),
    ],
)
def test_an_invalid_sweep_file_is_reported_with_its_name(text: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "sweeps" / "mine.yaml"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(SweepFileError, match=r"mine\.yaml") as caught:
        sweep_file.read(path, compose.read_yaml)
    assert told in str(caught.value)


def test_a_sweep_file_of_many_points_is_read(tmp_path: Path) -> None:
    """More values than OmegaConf 2.4 reads unless it is told otherwise."""
    path = tmp_path / "mine.yaml"
    path.write_text("concat:\n" + "".join(f"  - {{batch.micro: {n}}}\n" for n in range(3500)))
    assert len(sweep_file.read(path, compose.read_yaml).concat) == 3500


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("axes: {zero: [stge1]}", "zero has no option 'stge1'. Did you mean 'stage1'?"),
        ("axes: {zeroo: [stage1]}", "'zeroo' is not a setting. Did you mean 'zero=stage1'?"),
        ("axes: {batch.micro: [a]}", "batch.micro=a: expected a whole number"),
        (
            "axes: {zero: [stage1]}\nexclude: [{zeroo: stage1}]",
            "'zeroo' is set by none of the sweep's points; did you",
        ),
        ("axes: {zero: [stage1]}\nexclude: [{zero: stage1}]", "exclude leaves none"),
        (
            "axes: {zero: [stage1, stage2]}\nexclude: [{zero: stge2}]",
            "exclude: zero has no option 'stge2'. Did you mean",
        ),
        (
            "axes: {zero: [stage1]}\nwhen: [{if: {zero: stage9}, set: {seed: 1}}]",
            "when: if: zero has no option 'stage9'",
        ),
        ("axes: {zero: [stage1]}\nwhen: [{if: {zero: stage2}, set: {sed: 1}}]", "when: set: 'sed' is not a setting"),
        (
            "# @package _global_\nhydra: {mode: MULTIRUN, sweeper: {params: {zero: '[stage1,stage2]'}}}",
            "takes one option",
        ),
    ],
)
def test_wrong_settings_in_a_sweep_file_are_reported(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "mine.yaml").write_text(text)
    with pytest.raises(compose.ComposeError) as caught:
        compose.compose(arguments.split(["sweeps=mine", "--config-dir", str(tmp_path)]))
    assert told in str(caught.value)


def test_a_mistake_that_several_points_share_is_reported_once(tmp_path: Path) -> None:
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "mine.yaml").write_text("axes: {batch.micr: [1, 2]}")
    with pytest.raises(compose.ComposeError) as caught:
        compose.compose(arguments.split(["sweeps=mine", "--config-dir", str(tmp_path)]))
    assert str(caught.value).count("batch.micr'") == 1


def test_numbers_in_a_sweep_file_are_parsed_as_in_conf_and_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "mine.yaml").write_text("axes: {optimizer.lr: [1e-3, 3E-4, 1_0.5]}")
    found = compose.compose(arguments.split(["sweeps=mine", "--config-dir", str(tmp_path)]))
    assert [one.values["optimizer"]["lr"] for one in found.points] == [1e-3, 3e-4, 10.5]


def test_a_duplicate_key_in_an_option_file_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "zero").mkdir()
    (tmp_path / "zero" / "mine.yaml").write_text("stage: 1\nstage: 2\n")
    with pytest.raises(compose.ComposeError, match=r"zero/mine\.yaml, line 2: 'stage' occurs twice"):
        compose.compose(arguments.split(["zero=mine", "--config-dir", str(tmp_path)]))


def test_a_sweep_file_in_hydras_own_form_works(tmp_path: Path) -> None:
    (tmp_path / "sweeps").mkdir()
    params = {"zero": "stage0,stage1", "precision": "fp32"}
    body = {"hydra": {"mode": "MULTIRUN", "sweeper": {"params": params}}}
    (tmp_path / "sweeps" / "old.yaml").write_text("# @package _global_\n" + yaml.safe_dump(body))
    found = compose.compose(arguments.split(["sweeps=old", "--config-dir", str(tmp_path)]))
    assert [one.values["zero"]["stage"] for one in found.points] == [0, 1]


def test_conf_and_sweeps_folders_in_the_current_folder_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "conf" / "zero").mkdir(parents=True)
    (tmp_path / "sweeps").mkdir()
    text = (folders.CONF / "zero" / "stage1.yaml").read_text()
    (tmp_path / "conf" / "zero" / "mine.yaml").write_text(text.replace("prefetch: 1", "prefetch: 3"))
    (tmp_path / "sweeps" / "own.yaml").write_text("axes: {zero: [mine, stage2]}")
    monkeypatch.chdir(tmp_path)
    found = compose.compose(arguments.split(["sweeps=own"]))
    assert [one.values["zero"]["prefetch"] for one in found.points] == [3, 1]


@pytest.mark.parametrize("cores", [1, 2, 64])
def test_the_scaling_sweep_uses_the_same_threads_per_rank_for_any_number_of_ranks(cores: int) -> None:
    found = compose.compose(arguments.split(["sweeps=scaling", "resources.ranks=1,2,4"]))
    points, _ = checked_points(found, Scene(Hardware(cores=cores, cpu="cpu")))
    resources = [one.config.resources for one in points if isinstance(one, Point)]
    assert [one.ranks for one in resources] == [1, 2, 4]
    assert len({one.threads for one in resources}) == 1


# ---- quick composition ----------------------------------------------------------------------------------------------


GROUPS = {
    folder.name: sorted(file.stem for file in folder.glob("*.yaml"))
    for folder in sorted(folders.CONF.iterdir())
    if folder.is_dir() and folder.name != "experiment"  # whose files have a package header: Hydra composes them
}


def covering_lines() -> list[list[str]]:
    """Lines with one option of every group, such that any two options of different groups share at least one line."""
    options = [(group, option) for group, names in GROUPS.items() for option in names]
    left = dict.fromkeys(frozenset(pair) for pair in combinations(options, 2) if pair[0][0] != pair[1][0])
    lines = []
    while left:
        chosen = dict(sorted(next(iter(left))))
        for group in GROUPS:
            if group not in chosen:
                news = {
                    option: sum(frozenset([(group, option), other]) in left for other in chosen.items())
                    for option in GROUPS[group]
                }
                chosen[group] = max(GROUPS[group], key=news.__getitem__)
        for pair in combinations(chosen.items(), 2):
            left.pop(frozenset(pair), None)
        lines.append([f"{group}={chosen[group]}" for group in GROUPS])
    return lines


def hydras_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.compose.merge.Merger.merge", lambda *_: None)
    monkeypatch.setattr("orchestrator.compose.merge.apply", lambda *_: False)


@pytest.mark.full
def test_merged_points_equal_the_points_that_hydra_composes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries the first of `covering_lines`, of which the full suite tries all, and settings of every kind."""
    plain = ["optimizer.lr=1e-4", "zero=stage3", "batch.accumulation=null", "output=/a/b c", "data.path='x'"]
    lines = [*covering_lines()[:1], [*plain, "precision.keep_dtype=[a,b]"]]
    lines += [["experiment=paper_bytes", "zero=stage1", "batch.micro=${measure.steps}", "seed=7"], ["+zero.stage2=1"]]
    same_as_hydra(lines, monkeypatch)


@pytest.mark.full
def test_every_pair_of_options_is_merged_as_hydra_composes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = covering_lines()
    with monkeypatch.context() as without:
        without.setattr(compose.Composer, "_by_hydra", lambda *_: pytest.fail("a line was not merged"))
        # An error would hide the other options of its line.
        assert [line for line in lines if isinstance(outcome(line), str)] == []
    same_as_hydra(lines, monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize("experiment", sorted(file.stem for file in (folders.CONF / "experiment").glob("*.yaml")))
def test_every_option_is_composed_with_every_experiment(experiment: str) -> None:
    for number in range(max(map(len, GROUPS.values()))):
        line = [f"{group}={names[number % len(names)]}" for group, names in GROUPS.items()]
        assert not isinstance(outcome([*line, f"experiment={experiment}"]), str)


def outcome(line: list[str]) -> object:
    try:
        point = compose.compose(arguments.split(line)).points[0]
    except compose.ComposeError as error:
        return str(error)
    # Hydra also lists hydra/launcher and the like among its choices.
    return point.values, {group: point.choices[group] for group in ("zero", "model", "experiment")}, point.overrides


def same_as_hydra(lines: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    ours = [outcome(line) for line in lines]
    hydras_own(monkeypatch)
    theirs = [outcome(line) for line in lines]
    for line, one, other in zip(lines, ours, theirs, strict=True):
        assert one == other, line


@pytest.mark.full
def test_a_thousand_points_are_composed_checked_and_named_in_seconds(tmp_path: Path) -> None:
    """The limit is ten seconds of CPU time; Hydra alone would take minutes."""
    (tmp_path / "sweeps").mkdir()
    axes = {
        "zero": ["stage0", "stage1", "stage2", "stage3"],
        "precision": ["fp32", "bf16", "bf16_pure", "fp16"],
        "model": ["llama_tiny", "gpt2", "llama_1b"],
        "optimizer": ["adamw", "lion"],
        "batch.micro": list(range(1, 12)),
    }
    (tmp_path / "sweeps" / "large.yaml").write_text(yaml.safe_dump({"axes": axes}))
    begun = time.process_time()
    found = compose.compose(arguments.split(["sweeps=large", "--config-dir", str(tmp_path)]))
    points, _ = checked_points(found, LAPTOP)
    names = {point_id(to_dict(point.config), 2, "cpu") for point in points}
    assert len(found.points) == 1056
    assert len(names) == len(points) > 1000
    assert time.process_time() - begun < 10


def test_zip_groups_with_the_same_keys_are_counted_as_separate_axes() -> None:
    sweep = SweepFile(zip=[{"batch.micro": [1, 2], "batch.accumulation": [2, 1]}] * 40)
    with pytest.raises(TooManyPoints, match=f"found {2**40:,} .2 of batch.micro.batch.accumulation x 2 of"):
        expand(sweep, {})
