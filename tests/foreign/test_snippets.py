"""Every snippet of three documents on DeepSpeed runs here as docs/from_deepspeed.md says, or is refused as it says."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from harness.patience import HANG_S
from harness.ranks import run_alone, run_ranks
from harness.snippet_runs import FOLDER, Job, SnippetResult, run_all, run_job, shown

from orchestrator.config.strict import Refusal
from orchestrator.wings.scripts import launch_script

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "from_deepspeed.md").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Case:
    """A snippet as the page lists it. says: parts of rank 0's output; refused: the start of the error. Both are on the
    page. meaning: what the engine answers (see snippet_runs)."""

    job: Job
    says: tuple[str, ...] = ()
    refused: str = ""
    meaning: dict[str, Any] = field(default_factory=dict)


def accepted(name: str, meaning: dict[str, Any], **arguments: Any) -> Case:
    return Case(Job(name, arguments=arguments), meaning=meaning)


def script(name: str, *says: str, words: str = "", refused: str = "") -> Case:
    return Case(Job(name, words), says, refused)


ON_HOST = ("cpu", "device")
DECAY = "WarmupDecayLR(warmup_min_lr=0, warmup_max_lr=0.25, warmup_num_steps=1, warmup_type='log', total_num_steps=2)"
TRANSLATION = (
    "--deepspeed {snippets}/zero3.json --model_name_or_path {models}/t5 --per_device_train_batch_size 1 --output_dir "
    "output_dir --fp16 --do_train --max_train_samples 4 --num_train_epochs 1 --source_lang en --target_lang ro "
    "--predict_with_generate --per_device_eval_batch_size 2 --save_strategy no --report_to none"
)
EVALUATION = (
    "--do_eval --deepspeed {snippets}/%s.json --output_dir out --per_device_eval_batch_size 2 --report_to none "
    "--remove_unused_columns false"
)
# In the order of the page. Those that need ranks of their own or no ranks have tests of their own below.
CASES: dict[str, Case] = {
    "estimator": script("estimator.py", "2,783,959,040 parameters, 1 ranks on 1 nodes"),
    "config-file": script("config_file.py", "2 steps at stage 3"),
    "config-dict": script("config_dict.py", "2 steps at stage 2"),
    "zero1": accepted("zero1.json", {"stage": 1, "batch": (4, 2, 1)}),
    "zero2-misprint": Case(
        Job("zero2_without_a_comma.json", without="hjson"),  # which reads it, as in DeepSpeed
        refused="PlanError: config zero2_without_a_comma.json, line 5: expected JSON, found: Expecting ',' delimiter",
    ),
    "zero2": accepted("zero2.json", {"stage": 2, "offloads": ON_HOST}),
    "zero3": accepted("zero3.json", {"stage": 3, "offloads": ("cpu", "cpu"), "saved": ["model.safetensors"]}),
    "nvme-misprint": Case(
        Job("nvme_with_aio_inside.json"),
        refused="PlanError: config: 1 problem:\n  zero_optimization.aio: unknown key; it belongs at aio",
    ),
    "nvme": accepted("nvme.json", {"stage": 3, "offloads": ("nvme", "nvme"), "optimizer": "AdamWConfig"}),
    "optimizer": accepted(
        "optimizer.json", {"optimizer": "AdamWConfig", "rate": 0.25}, learning_rate=0.25, lr_scheduler_type="constant"
    ),
    "scheduler": accepted("scheduler.json", {"schedule": DECAY}, learning_rate=0.25),
    "untested-optimizer": accepted("untested_optimizer.json", {"idle": ["zero_allow_untested_optimizer"]}),
    "other-cpu-optimizer": accepted("other_cpu_optimizer.json", {"idle": ["zero_force_ds_cpu_optimizer"]}),
    "fp32": accepted("fp32.json", {"computes": "fp32"}),
    "fp16": accepted("fp16.json", {"computes": "fp16", "scale": 2.0**16}, fp16=True),
    "bf16": accepted("bf16.json", {"computes": "bf16", "reduces": "fp32"}, bf16=True),
    "amp": Case(
        Job("amp.json"),
        refused="PlanError: config: 1 problem:\n  amp: Apex' mixed precision (use fp16 or bf16) is not here",
    ),
    "batch": accepted(
        "batch.json", {"batch": (12, 3, 2)}, per_device_train_batch_size=3, gradient_accumulation_steps=2
    ),
    "accumulation": accepted("accumulation.json", {"batch": (12, 2, 3)}, gradient_accumulation_steps=3),
    "clipping": accepted("clipping.json", {"clipping": 0.25}, max_grad_norm=0.25),
    "communication": accepted("communication.json", {"computes": "bf16", "reduces": "fp32"}, bf16=True),
    "translation": script("translation.py", "en to ro: 2 steps, 4 translations", words=TRANSLATION),
    "node-local": accepted("node_local.json", {"idle": []}),
    "gather-on-save": accepted("gather_on_save.json", {"stage": 3, "saved": ["model.safetensors"]}, bf16=True),
    "evaluation": script("your_program.py", "stage 3, the loss of one process: True", words=EVALUATION % "zero3"),
    "pretrained": script(
        "pretrained.py", "stage 3, the numbers of the model in one process: True", words="{models}/gpt2"
    ),
    "from-config": script("from_config.py", "one model on 2 ranks: True", words="{models}/gpt2"),
    "inference-misprint": script(
        "inference.py",
        words="{models}/t5 as_printed",
        refused="PlanError: config: 1 problem:\n  zero_optimization.stage3_prefetch_bucket_size: expected a whole "
        "number, found 230.4",
    ),
    "inference": script("inference.py", "rank0: tokens of the model in one process: True", words="{models}/t5 rounded"),
    "versions": script("versions.py", "torch: ", "transformers: ", "deepspeed: "),
    "overflow": script(
        "overflow.py",
        "skipped 17 steps, then: step 1: loss 10000.0 and gradient norm inf",
        "the loss scale is 1, at its minimum, and cannot fall further",
        words="16 1000",
    ),
    "more-scale": script("overflow.py", "skipped 17 of 40 steps, loss scale 65536", words="32 3"),
    "given-optimizer-misprint": script(
        "given_optimizer.py",
        words="optimizer",
        refused="TypeError: Trainer.__init__() got an unexpected keyword argument 'optimizer'",
    ),
    "given-optimizer": script("given_optimizer.py", "2 steps with SgdConfig", words="optimizers"),
    "fine-tuning": script(
        "fine_tuning.py",
        "[Step 2] some memory is used: True",
        "[Step 4] some memory is used: True",
        "6 steps at stage 2, betas (0.9, 0.999), saved True",
    ),
    "auto-tp": script(
        "small_check.py",
        words="{snippets}/auto_tp.json",
        refused="PlanError: config: 1 problem:\n  tensor_parallel.tp_size: expected a divisor of the 2 ranks, found 4",
    ),
    "zero3-fp16": script(
        "small_check.py", "micro-batches of 16, fp16 True", words="{snippets}/zero3_without_offload.json"
    ),
    "loop": script(
        "loop.py",
        "Step: 0, Loss: ",
        "Max allocated: 0.00 GB",
        words="{snippets}/zero3_without_offload.json 2",
    ),
}
# Tested below, each in its own way.
OTHERS = ("install", "examples", "torchrun", "slurm", "notebook", "launch", "launch-flags", "profile")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, SnippetResult]]:
    """What every snippet did on two ranks, in one world: the imports of a rank take longer than most snippets."""
    jobs = {name: case.job for name, case in CASES.items()}
    return run_ranks(run_all, 2, str(tmp_path_factory.mktemp("snippets")), jobs)


def row_of(name: str) -> str:
    """The row of the page's table for a snippet."""
    (row,) = re.findall(rf"^\| `{name}` \|.*$", PAGE, re.MULTILINE)
    return str(row)


@pytest.mark.parametrize("name", CASES)
def test_a_snippet_does_what_its_row_says(name: str, results: list[dict[str, SnippetResult]]) -> None:
    case, row = CASES[name], row_of(name)
    ranks = [one[name] for one in results]
    assert [one.refused[: len(case.refused)] for one in ranks] == [case.refused] * 2, shown(results, name)
    assert [bool(one.refused) for one in ranks] == [bool(case.refused)] * 2, shown(results, name)
    text = "\n".join(ranks[0].printed)
    assert [part for part in case.says if part not in text] == [], shown(results, name)
    for one in ranks:
        assert {key: one.meaning.get(key) for key in case.meaning} == case.meaning
        assert one.meaning.get("steps", 2) == 2
    said = [*case.says, case.refused.split("\n  ")[-1].removeprefix("PlanError: ")]
    assert [part for part in said if part.rstrip(": ") not in row] == []


def test_a_callback_prints_on_the_first_rank_alone(results: list[dict[str, SnippetResult]]) -> None:
    lines = [[line for line in one["fine-tuning"].printed if line.startswith("[Step")] for one in results]
    assert [len(one) for one in lines] == [3, 0]


def test_the_page_lists_every_snippet_once_and_every_file_has_a_row() -> None:
    part = PAGE[PAGE.index("## The snippets of three") : PAGE.index("## Not said by")]
    named = re.findall(r"^\| `([a-z0-9-]+)` \|", part, re.MULTILINE)
    assert sorted(named) == sorted([*CASES, *OTHERS])
    assert [name for name in named if name in CASES] == [*CASES]  # in the order of the documents
    files = {case.job.name for case in CASES.values()} | {"notebook.py", "launch.slurm"}
    files |= {path.name for case in CASES.values() for word in case.job.words.split() if (path := Path(word)).suffix}
    assert files == {path.name for path in FOLDER.iterdir() if path.is_file()}


def test_each_rank_answers_a_prompt_of_its_own(results: list[dict[str, SnippetResult]]) -> None:
    for rank, one in enumerate(results):
        assert f"rank{rank}: tokens of the model in one process: True" in one["inference"].printed
    first, second = (one["inference"].printed for one in results)
    assert first[0].split("in=")[1] != second[0].split("in=")[1]


# ---- commands ------------------------------------------------------------------------------------------------------


def test_the_extra_for_the_trainer_has_what_it_needs() -> None:
    assert "pip install '.[trainer]'" in row_of("install")
    (extra,) = re.findall(r"^trainer = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)
    assert "accelerate" in extra


def test_examples_of_an_optimizer_are_found_by_its_name() -> None:
    assert "grep -il lamb conf/optimizer/*.yaml" in row_of("examples")
    found = [path.name for path in sorted((ROOT / "conf" / "optimizer").glob("*.yaml")) if "lamb" in path.read_text()]
    assert found == ["lamb.yaml"]


def test_readmes_example_learns_and_its_ranks_end_by_themselves(tmp_path: Path) -> None:
    (script,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    meet = {**environment(), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    line = [sys.executable, str(tmp_path / "train.py")]
    ranks = [
        subprocess.Popen(line, env={**meet, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True) for rank in range(2)
    ]
    try:
        told = [[float(loss) for loss in rank.communicate(timeout=HANG_S)[0].split()] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert told[0] == told[1]
    assert len(told[0]) == 10
    assert told[0][-1] < told[0][0] / 4


PRINTS = "import os, sys; print(os.environ['RANK'], 'of', os.environ['WORLD_SIZE'], *sys.argv[1:])\n"


@pytest.mark.parametrize("flag", ["--num_gpus=4", "--ranks=4"])
def test_the_launcher_starts_a_script_with_its_words(
    flag: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("main.py").write_text(PRINTS, encoding="utf-8")
    words = "main.py --task sft_train --subtask sft --checkpoint_dir ./model/sft_checkpoint"
    assert f"zlab launch --num_gpus=4 {words}" in row_of("launch")
    assert launch_script.main([flag, "--device", "cpu", *words.split()]) == 0
    own = words.removeprefix("main.py ")
    lines = [f"0 of 4 {own}", *(f"rank {rank}: {rank} of 4 {own}" for rank in (1, 2, 3))]
    assert sorted(capfd.readouterr().out.splitlines()) == sorted(lines)


@pytest.mark.parametrize(
    ("name", "told", "words"),
    [
        (
            "launch-flags",
            "--module training_script.py: expected a module's name, found a file",
            "--device cpu --num_gpus 4 --num_nodes 1 --master_port 29500 --module training_script.py",
        ),
        ("profile", "--profile: it is not here", "--profile train.py"),
    ],
)
def test_flags_of_the_launcher_that_do_nothing_are_refused_by_name(name: str, told: str, words: str) -> None:
    with pytest.raises(Refusal) as caught:
        launch_script.main(words.split())
    assert caught.value.problems[0].startswith(told)
    assert f"`{told}`" in row_of(name)


def in_a_notebook(folder: str) -> SnippetResult:
    os.chdir(folder)
    return run_job(Job("notebook.py"), Path(folder))


def test_a_cell_that_sets_the_environment_of_a_launcher_trains(tmp_path: Path) -> None:
    found = run_alone(in_a_notebook, str(tmp_path))
    assert found.refused == ""
    assert "2 steps on 1 rank" in found.printed
    assert "2 steps on 1 rank" in row_of("notebook")


@pytest.mark.full
def test_two_launchers_of_torchrun_meet_as_two_nodes(tmp_path: Path) -> None:
    script = [str(FOLDER / "small_check.py"), str(FOLDER / "zero3_without_offload.json")]
    port = free_port()
    nodes = [
        subprocess.Popen(
            [sys.executable, *torchrun(node, port), *script],
            env=environment(), stdout=subprocess.PIPE, text=True, cwd=tmp_path
        )
        for node in range(2)
    ]  # fmt: skip
    try:
        told = [node.communicate(timeout=HANG_S)[0].splitlines() for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    assert told == [["micro-batches of 16, fp16 True"]] * 2
    assert "micro-batches of 16, fp16 True" in row_of("torchrun")


@pytest.mark.full
def test_the_slurm_script_starts_the_ranks_of_a_node(tmp_path: Path) -> None:
    """`scontrol` names this machine and `srun` starts one process: a cluster of one node, two ranks on it."""
    for name, text in {"scontrol": "echo 127.0.0.1", "srun": 'export SLURM_PROCID=0\nshift 2\nexec "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    text = (FOLDER / "launch.slurm").read_text(encoding="utf-8")
    text = text.replace("GPUS_PER_NODE=8", "GPUS_PER_NODE=2").replace("MASTER_PORT=9901", f"MASTER_PORT={free_port()}")
    words = shlex.join([str(FOLDER / "small_check.py"), str(FOLDER / "zero3_without_offload.json")])
    (tmp_path / "launch.slurm").write_text(text.replace("your_program.py", words), encoding="utf-8")
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    slurm = {"PATH": path, "SLURM_NNODES": "1", "SLURM_JOBID": "1", "SLURM_JOB_NODELIST": "here"}
    done = subprocess.run(
        ["bash", "launch.slurm"], env=environment() | slurm, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == ["micro-batches of 16, fp16 True"] * 2, done.stderr
    assert "micro-batches of 16, fp16 True" in row_of("slurm")


def torchrun(node: int, port: int) -> list[str]:
    """The words of torchrun for one of two nodes with one rank each."""
    nodes = ["--nproc_per_node=1", "--nnodes=2", f"--node_rank={node}"]
    return ["-m", "torch.distributed.run", *nodes, "--master_addr=127.0.0.1", f"--master_port={port}"]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
