"""The quick check reports each misspelling in one line with the closest valid spelling, and accepts valid lines."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from orchestrator.compose import arguments, compose
from orchestrator.compose.compose import ComposeError
from orchestrator.compose.overrides import check
from orchestrator.compose.settable import Tree, read_tree
from orchestrator.wings.words import suggestions

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def tree() -> Tree:
    return read_tree()


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("zero=stge2", "zero has no option 'stge2'. Did you mean 'stage2'?"),
        ("zero=2", "Did you mean 'stage2'?"),
        ("zero.stagee=2", "'zero.stagee' is not a setting. Did you mean 'zero.stage'"),
        ("zeor=stage2", "Did you mean 'zero=stage2'?"),
        ("zeor=stge2", "Did you mean 'zero=stage2'?"),
        ("micro=3", "Did you mean 'batch.micro'"),
        ("batch.micro=abc", "batch.micro=abc: expected a whole number"),
        ("batch.micro=1.5", "batch.micro=1.5: expected a whole number"),
        ("batch.micro=true", "expected a whole number"),
        ("batch.micro=", "expected a whole number"),
        ("optimizer.lr=fast", "optimizer.lr=fast: expected a number"),
        ("model.name=gpt2", "model.name=gpt2: model.name is a name and chooses nothing. Did you mean 'model=gpt2'?"),
        ("hardware.name='a100_80gb'", "Did you mean 'hardware=a100_80gb'?"),
        ("precision.param=bf61", "expected one of fp32, bf16, fp16. Did you mean 'bf16'?"),
        ("+bogus=1", "'bogus' is not a setting."),
        ("++zero.bogus=1", "zero has: stage prefetch shard_ranks outer_sharding reduce_at_boundary unit_numel"),
        ("experiment=nope", "experiment has no option 'nope'."),
        ("sweeps=nope", "sweeps has no option 'nope'."),
        ("sweeps=null", "sweeps has no option 'null'."),
        ("rank_by=step_ms", "'rank_by' is a key of a sweep's file: write it into sweeps/NAME.yaml"),
        ("seeds=[1,2]", "on a line it is -m seed=1,2,3"),
        ("sweeps/stages.yaml", "Did you mean 'sweeps=stages'?"),
        ("sweeps=../elsewhere/sweeps/stages.yaml", "Did you mean 'stages'?"),
        ("stage2", "'stage2' is not key=value. Did you mean 'zero=stage2'?"),
        ("+zero=stage1", "write zero=stage1 without the +"),
        ("~zero", "a run needs zero"),
        ("~batch.micro", "a run needs batch.micro"),
        ("hydra.run.dir=here", "'hydra.run.dir' has no effect here"),
        ("model.config.hiden_size=3", "Did you mean 'model.config.hidden_size'?"),
        ("zero=stage1,stage2", "run.py -m zero=stage1,stage2"),
        ("batch.micro=range(1,4)", "needs -m (sweep)"),
        ("zero=[stage0,stage1]", "zero takes one option, found the list [stage0,stage1]. Did you mean '"),
        ("zero=[stage0,stage1]", "run.py -m zero=stage0,stage1'?"),
        ("model=[gpt2]", "Did you mean 'model=gpt2'?"),
        ("resources.device=gpu", "Did you mean 'cuda'?"),
        ("precision=BF16", "Did you mean 'bf16'?"),
        ("steps=100", "Did you mean 'measure.steps' (a whole number, or null)?"),
        ("epochs=1", "Did you mean 'train.epochs'"),
        ("resources.gpus=8", "Did you mean 'resources.ranks'"),
        ("dtype=bf16", "Did you mean 'precision=bf16'?"),
        ("batch=8", "Did you mean 'batch.micro=8'?"),
        (f"data={__file__}", f"Did you mean 'data=text data.path={__file__}'?"),
        ("data=x.jsonl", "options: pairs"),  # there is no such file
        ("model=tests", "Did you mean 'model=./tests'?"),
        ("dataset=x.jsonl.gz", "Did you mean 'data=pairs data.path=x.jsonl.gz'?"),
        ("deepspeed=ds.json", "run.py import ds.json'?"),
        ("fp16=true", "Did you mean 'precision=fp16'?"),
        ("lora_r=8", "Did you mean 'adapter=lora adapter.rank=8'?"),
        ("adapter.r=8", "Did you mean 'adapter=lora adapter.rank=8'?"),
        ("target_modules=all-linear", "Did you mean 'adapter=lora adapter.targets=all-linear'?"),
        *((f"{key}=x", "Not here: a model attends by sdpa if it can") for key in ("attention", "attn_implementation")),
        *((f"{key}=true", "Not here: a run compiles no model") for key in ("compile", "torch_compile")),
        *((f"{key}=x", "Not here: results go to MLflow (tracking=mlflow)") for key in ("wandb", "report_to")),
        ("model.class=LlamaForCausalLM", "Not here: transformers' class follows from model=NAME or model=FOLDER"),
        ("max_seq_length=512", "Did you mean 'batch.seq'"),
        ("optim=adamw_torch", "Did you mean 'optimizer=adamw'?"),
        ("gradient_checkpointing=true", "Did you mean 'recompute=full'?"),
        ("recompte=none", "Did you mean 'recompute=none'?"),
        ("fp16=false", "'fp16' is not a setting.      known: "),
        ("tracking.uri=[x", "tracking.uri=[x: no viable alternative at input '[x'"),
        ("optimizer.clip_norm={a:1}", "optimizer.clip_norm={a:1}: expected a number, or null"),
        ("batch.micro=foo(1)", "batch.micro=foo(1): HydraException while evaluating 'foo(1)': Unknown function 'foo'"),
        (f"output={'[' * 900 + ']' * 900}", "expected brackets in a few levels"),
        ("zero=stage1,", "zero=stage1,: expected a value after the last comma"),
        ("batch.bad=[x", "'batch.bad' is not a setting."),
        ("zero@precision=stage1", "'zero@precision' is not a setting."),
        ("plan", "a line of settings needs no verb. Did you mean '"),
        ("plan", "run.py --plan'?"),
        ("help", "run.py --help'?"),
    ],
)
def test_each_mistake_is_reported_in_one_line(line: str, told: str, tree: Tree) -> None:
    problems = check([line], tree, multirun=False)
    assert len(problems) == 1
    assert told in problems[0]


@pytest.mark.parametrize(
    "line",
    [
        "zero=stage3 precision=bf16 batch.micro=8 batch.global_size=null optimizer.lr=1e-3 optimizer.eps=1e-8",
        "++zero.stage=2 +resources.ranks=4 optimizer.clip_norm=null optimizer.lr=1",
        "model=gpt2 model.config.n_layer=2 +model.config.attention_bias=true",
        "model.config.rope_parameters.rope_theta=10000.0 +model.config.rope_parameters.extra=1",
        "data=text data.path=/tmp/a-b_c.txt experiment=paper_bytes seed=7 ~model.config.rms_norm_eps",
        "batch.micro=${batch.seq} sweeps=stages zero=stage1 zero={stage:1}",
        "data=text data.path='a,b' optimizer.lr=float(1)",
        'zero="stage2" zero=stage2.yaml',
        "adapter=lora adapter.targets=all-linear precision.weights=int4 precision.keep_dtype=*norm*",
    ],
)
def test_valid_lines_pass(line: str, tree: Tree) -> None:
    assert check(line.split(), tree, multirun=False) == []


@pytest.mark.parametrize(
    "line",
    ["zero=stage0,stage1 precision=fp32,bf16", "batch.micro=range(1,4)", "zero=choice(stage1,stage2)", "zero=glob(*)"],
)
def test_lists_pass_in_a_sweep(line: str, tree: Tree) -> None:
    assert check(line.split(), tree, multirun=True) == []


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("zero = stage2", "zero=stage2"),
        ("zero= stage2 seed=1", "zero=stage2"),
        ("zero =stage2", "zero=stage2"),
        ("-m zero=stage1, stage2", "zero=stage1,stage2"),
    ],
)
def test_spaces_around_equals_and_after_commas_are_one_error(line: str, meant: str, tree: Tree) -> None:
    (problem,) = check(arguments.split(line.split()).overrides, tree, multirun=False)
    assert problem.endswith(f"has spaces around = or after a comma: write {meant}")


def test_a_sweep_typed_without_m_is_suggested_with_its_flags_and_shell_quoting(tree: Tree) -> None:
    (problem,) = check(["data.path=a b", "seed=range(1,3)"], tree, multirun=False, flags=["--config-dir=mine"])
    assert problem.endswith("run.py -m --config-dir=mine 'data.path=a b' 'seed=range(1,3)'")


def test_each_value_of_a_list_is_checked(tree: Tree) -> None:
    problems = check(["zero=stage0,stge1,choice", "batch.micro=shuffle(1,x)"], tree, multirun=True)
    assert [one.split(".")[0] for one in problems] == [
        "zero has no option 'stge1'",
        "zero has no option 'choice'",
        "batch",
    ]


def test_all_mistakes_are_reported_together(tree: Tree) -> None:
    assert len(check(["zero=stge2", "batch.micro=abc", "+bogus=1", "seed=x"], tree, multirun=False)) == 4


def test_a_users_config_folder_adds_options(tmp_path: Path) -> None:
    (tmp_path / "zero").mkdir()
    (tmp_path / "zero" / "mine.yaml").write_text("stage: 1\n")
    assert check(["zero=mine"], read_tree(str(tmp_path)), multirun=False) == []


def test_flags_may_come_before_or_after_overrides() -> None:
    found = arguments.split(["zero=stage1", "-m", "precision=fp32", "--config-dir=/x", "batch.micro=2"])
    assert (found.multirun, found.overrides) == (True, ["zero=stage1", "precision=fp32", "batch.micro=2"])
    assert found.flags["--config-dir"] == "/x"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--multrun", "Did you mean '--multirun'?"),
        ("-x", "there is no flag '-x'"),
        ("--cfg", "--cfg needs a value: one of job hydra all"),
        ("--cfg jb", "--cfg cannot be 'jb': one of job hydra all"),
        ("-m --cfg job", "--multirun and --cfg cannot be asked for together"),
        ("--resolve", "--resolve belongs to --cfg"),
        ("--config-path x=1", "add a folder of your own with --config-dir"),
        ("--zero=stage2", "'--zero' is a setting and has no dashes: write zero=stage2"),
        ("-batch.micro 3", "write batch.micro=3"),
    ],
)
def test_wrong_flags_are_reported(line: str, told: str) -> None:
    problems = arguments.split(line.split()).problems
    assert len(problems) == 1
    assert told in problems[0]


def test_a_text_that_needs_quotes_is_shown_with_those_of_shell_and_hydra() -> None:
    assert suggestions.quoted("output=b#1", "LexerNoViableAltException").endswith(""": type "output='b#1'\"""")
    for value in ("b#1", "é", "it's", "a,b;c", "a\nb", "a\nb'c", "a`b", 'a"b', "$a#", "a)b"):
        with pytest.raises(ComposeError) as caught:
            compose.compose(arguments.split(["-m", f"output={value}", "zero=stage1"]))
        problem, _, line = str(caught.value).partition(": type ")
        assert problem.startswith(f"output={value}: ")
        done = subprocess.run(["bash", "-c", f"printf %s {line}"], capture_output=True, text=True, check=True)
        found = compose.compose(arguments.split(["-m", done.stdout, "zero=stage1"]))
        assert [point.values["output"] for point in found.points] == value.split(",")


def test_info_takes_the_next_word_only_if_it_is_a_valid_value() -> None:
    found = arguments.split(["--info", "zero=stage1"])
    assert (found.flags, found.overrides) == ({"--info": "all"}, ["zero=stage1"])
    assert arguments.split(["-i", "defaults"]).flags == {"--info": "defaults"}


def test_a_tilde_that_the_shell_leaves_in_a_path_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    line = ["data.path=~/a,~/b", "~experiment", "model.path=x~/y"]
    assert arguments.split(line).overrides == ["data.path=/home/me/a,/home/me/b", "~experiment", "model.path=x~/y"]


def test_a_tilde_is_refused_if_the_home_folder_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", unknown)
    (problem,) = arguments.split(["data.path=~/a", "zero=stage1"]).problems
    assert problem == "data.path=~/a: no home folder is known for ~; set HOME, or write the full path"
