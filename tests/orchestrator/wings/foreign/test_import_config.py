"""`zlab import` writes an experiment file that composes and prints JSON."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from orchestrator import cli
from orchestrator.compose import arguments
from orchestrator.compose.line import composed
from orchestrator.planning.points import checked_points
from orchestrator.planning.rules.scene import here

CONTENT = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 3,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "overlap_comm": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-4}},
}
TYPOS = {**CONTENT, "gradient_c1ipping": 0.5, "zero_optimization": {"stage": 3, "max_live": 1e9}}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("ds_config.json").write_text(json.dumps(CONTENT))
    return "ds_config.json"


def test_the_document_has_the_words_each_keys_fate_and_a_file_that_runs(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("batch.micro=2", "model=llama_tiny", "resources.ranks=2", "resources.device=cpu")
    assert cli.main(["import", file, *settings, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["source"] == file
    assert document["problems_here"] == []
    assert {"zero=stage3", "precision=bf16", "batch.accumulation=3", "optimizer.lr=0.0002", *settings} <= set(
        document["words"]
    )
    assert document["ranks"] == 2
    keys = {one["key"]: one for one in document["keys"]}
    assert keys["train_micro_batch_size_per_gpu"]["value"] == "auto = 2"
    assert {key: keys[key]["fate"] for key in ("bf16.enabled", "zero_optimization.overlap_comm")} == {
        "bf16.enabled": "mapped",
        "zero_optimization.overlap_comm": "idle",
    }
    assert any("stage3_max_live_parameters" in text for text in document["silently"])
    assert Path(document["config_dir"]) == tmp_path / "outputs" / "imported"
    line = ["--config-dir", document["config_dir"], f"experiment={document['experiment']}"]
    (point,), problems = checked_points(composed(arguments.split(line)), here())
    assert problems == []
    assert (point.config.zero.stage, point.config.optimizer.lr, point.config.batch.micro) == (3, 2e-4, 2)


def test_rows_of_deepspeed_get_the_keys_that_mean_nothing_to_the_others(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tuned = {"stage": 3, "overlap_comm": True, "reduce_bucket_size": 4096, "stage3_max_live_parameters": "auto"}
    tuned |= {"stage3_prefetch_bucket_size": 0}
    Path(file).write_text(json.dumps({**CONTENT, "zero_optimization": {**tuned, "offload_param": {"device": "none"}}}))
    assert cli.main(["import", file, "model=llama_tiny", "resources.ranks=2", "resources.device=cpu"]) == 0
    told = capsys.readouterr().out
    assert ": each block is one unit, which is gathered one ahead" in " ".join(told.split())
    assert "zero.prefetch=0" in told
    (line,) = (line for line in told.splitlines() if line.startswith("engines "))
    words = shlex.split(line)
    own = [word for word in words if word.startswith("engine.deepspeed.")]
    given = {"overlap_comm": True, "reduce_bucket_size": 4096, "stage3_prefetch_bucket_size": 0}
    assert own == [f"engine.deepspeed.zero_optimization.{key}={str(value).lower()}" for key, value in given.items()]
    points, problems = checked_points(composed(arguments.split(words[words.index("--config-dir") :])), here())
    assert problems == []
    native = {str(point.config.engine.kind): point.config.engine.native for point in points}
    assert native["deepspeed"] == {"zero_optimization": given}
    assert not any(native[kind] for kind in ("zero", "fsdp2", "plain"))


@pytest.mark.parametrize(
    ("words", "warns"),
    [
        ([], True),
        (["precision=bf16"], False),
        (["--args=--bf16"], False),
        (["--args=--seed 1"], False),
    ],
)
def test_a_precision_that_nothing_answers_is_warned_of(
    words: list[str], warns: bool, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(file).write_text(json.dumps({"train_batch_size": "auto", "bf16": {"enabled": "auto"}}))
    assert cli.main(["import", file, "model=llama_tiny", *words]) == 0
    told = capsys.readouterr().err
    assert ('warning: bf16.enabled "auto" is off' in told and "fix: --args='--bf16 ...'" in told) is warns


@pytest.mark.parametrize(
    ("args", "words", "told"),
    [
        (
            "--lora_rank 8 --target_modules all-linear",
            {"adapter=lora", "adapter.rank=8", "adapter.targets=all-linear"},
            "adapter.alpha: not given",
        ),
        (
            "--lora_r 4 --lora_alpha 32 --lora_target q_proj,v_proj --lora_dropout 0",
            {"adapter=lora", "adapter.rank=4", "adapter.alpha=32.0", "adapter.targets=[q_proj,v_proj]"},
            "",
        ),
        (
            "--lora_target all",
            {"adapter=lora", "adapter.targets=all-linear"},
            "adapter.rank, adapter.alpha: not given",
        ),
        ("--lora_dropout 0.05", None, "--lora_dropout 0.05: adapters have no dropout here"),
    ],
)
def test_adapters_of_the_scripts_arguments_are_those_of_the_point(
    args: str, words: set[str] | None, told: str, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(file).write_text(json.dumps({"train_batch_size": "auto", "zero_optimization": {"stage": 2}}))
    code = cli.main(["import", file, "model=llama_tiny", f"--args={args}", "--json"])
    out, err = capsys.readouterr()
    assert told in err
    assert code == (2 if words is None else 0)
    if words is not None:
        assert {one for one in json.loads(out)["words"] if one.startswith("adapter")} == words


ARGUMENTS = {
    "per_device_train_batch_size": 4,
    "num_train_epochs": 3,
    "lr_scheduler_type": "cosine",
    "optim": "adamw_torch",
    "seed": 7,
    "gradient_checkpointing": True,
    "bf16": True,
    "learning_rate": 2e-5,
    "torch_compile": True,
}
AUTO = {
    "train_batch_size": "auto",
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
}
# The settings that each argument becomes, with a JSON file that has an optimizer and a scheduler, and with FSDP.
OWN_ROWS = {
    "deepspeed": {
        "lr_scheduler_type": ["scheduler=warmup"],
        "optim": ["optimizer=adamw"],
        "bf16.enabled": ["precision=bf16"],
    },
    "fsdp": {
        "lr_scheduler_type": ["scheduler=cosine"],
        "optim": ["optimizer=adamw"],
        "learning_rate": ["optimizer.lr=2.0e-05"],
        "bf16": ["precision=bf16"],
    },
}


@pytest.mark.parametrize("kind", OWN_ROWS)
def test_each_argument_that_is_read_has_a_row(kind: str, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(file).write_text(json.dumps(AUTO))
    how = {"deepspeed": file, "warmup_steps": 9} if kind == "deepspeed" else {"fsdp": "full_shard"}
    Path("arguments.json").write_text(json.dumps({**ARGUMENTS, **how}))
    assert cli.main(["import", "arguments.json", "model=llama_tiny", "resources.ranks=2", "--json"]) == 0
    out, err = capsys.readouterr()
    rows = {one["key"]: one["words"] for one in json.loads(out)["keys"]}
    both = {"seed": ["seed=7"], "gradient_checkpointing": ["recompute=full"], "num_train_epochs": []}
    expected = {**OWN_ROWS[kind], **both}
    assert {name: rows[name] for name in expected} == expected
    assert ("lr_scheduler_type=cosine is not used, here as in the Trainer" in err) is (kind == "deepspeed")
    assert "torch_compile (a run compiles no model" in err


@pytest.mark.parametrize("share", [{"warmup_ratio": 0.03}, {"warmup_steps": 0.03}])
def test_a_warm_up_that_is_a_share_of_the_steps_asks_for_their_number(
    share: dict[str, float], file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(file).write_text(json.dumps(AUTO))
    Path("arguments.json").write_text(json.dumps({**ARGUMENTS, **share, "deepspeed": file}))
    assert cli.main(["import", "arguments.json", "model=llama_tiny"]) == 2
    (name,) = share
    assert f"{name}=0.03 needs the number of steps      fix: --args='--max_steps N'" in capsys.readouterr().err
    assert cli.main(["import", "arguments.json", "model=llama_tiny", "--args=--max_steps 200", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert "scheduler.warmup_steps=6" in document["words"]
    assert {"auto = 6"} == {one["value"] for one in document["keys"] if one["key"].endswith("warmup_num_steps")}


def test_a_point_that_cannot_run_here_ends_with_a_line_that_can(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(file).write_text(json.dumps(AUTO))
    args = f"torchrun --nnodes 2 --nproc_per_node 8 train.py --deepspeed {file} --warmup_steps 5"
    assert cli.main(["import", f"--args={args}", "model=llama_tiny"]) == 0
    ends = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("next ", "engines "))]
    assert len(ends) == 1
    assert " fit --config-dir " in ends[0]
    assert ends[0].endswith(" hardware=NAME")


def test_long_keys_wrap_at_their_dot(
    file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    Path(file).write_text(json.dumps(AUTO))
    assert cli.main(["import", file, "--args=--warmup_steps 9", "model=llama_tiny", "resources.ranks=2"]) == 0
    keys = [line.split("  ")[0] or line[2:].split("  ")[0] for line in capsys.readouterr().out.splitlines()]
    assert keys[keys.index("scheduler.params.") + 1] == "warmup_num_steps"


def test_a_model_may_be_a_path(file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}')
    assert cli.main(["import", file, "model=./mine", "--json"]) == 0
    assert {"model=pretrained", f"model.path={tmp_path / 'mine'}"} <= set(json.loads(capsys.readouterr().out)["words"])


def test_keys_that_cannot_be_read_are_refused_together(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(file).write_text(json.dumps(TYPOS))
    assert cli.main(["import", file]) == 2
    told = capsys.readouterr().err
    assert "gradient_c1ipping: unknown key; did you mean gradient_clipping?" in told
    assert "zero_optimization.max_live: unknown key" in told
    assert not Path("outputs").exists()


def test_a_word_that_is_no_setting_is_one_problem_however_often_it_is_typed(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["import", file, "--port", "--port"]) == 2
    assert capsys.readouterr().err.count("--port: expected a setting") == 1
