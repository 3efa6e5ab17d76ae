"""Files and lines of Accelerate, DeepSpeed and the Trainer become their point, or are refused in three lines."""

from __future__ import annotations

import json
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
from harness.launch_files import ACCELERATE, ALONE, ARGUMENTS, ULYSSES, ZERO3

from orchestrator import cli
from orchestrator.compose import arguments
from orchestrator.compose.line import composed
from orchestrator.wings.foreign.accelerate_flags import is_flag

LAUNCH = "accelerate launch --mixed_precision bf16 --num_processes 4 --num_machines 1"
TRAINED = "--per_device_train_batch_size 2 --learning_rate 1e-4 --output_dir out"
NO_FILE: tuple[dict[str, Any], None] = ({}, None)

# name: (files by name, FILE and --args of the command, the settings that it gives by their path)
RIGHT: dict[str, tuple[dict[str, Any], str | None, str | None, dict[str, Any]]] = {
    "accelerate_zero2": (
        *NO_FILE,
        f"{LAUNCH} --use_deepspeed --zero_stage 2 --gradient_accumulation_steps 4 --gradient_clipping 0.5 "
        f"--offload_optimizer_device cpu --zero3_init_flag false train.py {TRAINED}",
        {
            "zero.stage": 2,
            "precision.param": "bf16",
            "batch.accumulation": 4,
            "batch.micro": 2,
            "optimizer.clip_norm": 0.5,
            "optimizer.lr": 1e-4,
            "offload.optimizer": "cpu",
            "resources.ranks": 4,
        },
    ),
    "accelerate_flags_alone": (
        *NO_FILE,
        "--use_deepspeed --zero_stage=3 --mixed_precision fp16 --num_processes 8 --num_machines 2",
        {"zero.stage": 3, "precision.param": "fp16", "resources.ranks": 8, "resources.nodes": 2},
    ),
    "accelerate_names_a_file": (
        {"zero3.json": ZERO3},
        None,
        f"{LAUNCH} --use_deepspeed --deepspeed_config_file zero3.json train.py {TRAINED}",
        {"zero.stage": 3, "precision.param": "bf16", "batch.micro": 2, "resources.ranks": 4},
    ),
    "accelerate_flags_over_a_file": (
        {"fsdp.yaml": ACCELERATE.format(**ALONE)},
        None,
        f"accelerate launch --config_file fsdp.yaml --num_processes 2 --fsdp_offload_params true train.py {TRAINED}",
        {"zero.stage": 3, "offload.params": "cpu", "precision.reduce": "bf16", "resources.ranks": 2},
    ),
    "accelerate_fsdp": (
        *NO_FILE,
        f"{LAUNCH} --use_fsdp --fsdp_sharding_strategy SHARD_GRAD_OP --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP "
        f"--fsdp_activation_checkpointing true train.py {TRAINED}",
        {"zero.stage": 2, "recompute.kind": "full", "precision.param": "bf16", "resources.ranks": 4},
    ),
    "accelerate_ddp": (
        *NO_FILE,
        f"{LAUNCH} --multi_gpu --main_process_port 29501 train.py {TRAINED} --gradient_accumulation_steps 3",
        {"zero.stage": 0, "precision.param": "bf16", "batch.accumulation": 3, "resources.ranks": 4},
    ),
    "accelerate_starts_a_script_with_deepspeed": (
        {"zero3.json": ZERO3, "ddp.yaml": ACCELERATE.format(**{**ALONE, "kind": "MULTI_GPU", "machines": 2})},
        "ddp.yaml",
        "train.py --deepspeed zero3.json --bf16 --per_device_train_batch_size 2",
        {"zero.stage": 3, "precision.param": "bf16", "resources.ranks": 8, "resources.nodes": 2},
    ),
    "accelerate_sizes_of_1": (
        {"one.yaml": ACCELERATE.format(**ALONE)},
        "one.yaml",
        None,
        {"zero.stage": 3, "parallel.tp": 1, "resources.ranks": 8, "resources.nodes": 1},
    ),
    "accelerate_hybrid": (
        {"hybrid.yaml": ACCELERATE.format(**{**ALONE, "machines": 2, "replicas": 2, "shards": 4})},
        "hybrid.yaml",
        None,
        {"zero.stage": 3, "zero.shard_ranks": 4, "resources.ranks": 8, "resources.nodes": 2},
    ),
    "accelerate_tensor_parallel": (
        {"tp.yaml": ACCELERATE.format(**{**ALONE, "tp": 2, "shards": 4})},
        "tp.yaml",
        None,
        {"zero.stage": 3, "parallel.tp": 2, "resources.ranks": 8},
    ),
    "sequences_reduce_in_fp32": (
        {"ulysses.json": ULYSSES},
        "ulysses.json",
        None,
        {"parallel.sp": 2, "precision.reduce": "fp32"},
    ),
    "sequences_reduce_in_their_dtype": (
        {
            "ulysses.json": {
                **ULYSSES,
                "seq_parallel_communication_data_type": "bf16",
                "communication_data_type": "fp32",
            }
        },
        "ulysses.json",
        None,
        {"parallel.sp": 2, "precision.reduce": "bf16"},
    ),
    "deepspeed_launcher": (
        {"zero3.json": ZERO3},
        None,
        "deepspeed --num_nodes 2 --num_gpus 4 --master_port 29501 train.py --deepspeed --deepspeed_config zero3.json "
        "--per_device_train_batch_size 2 --bf16",
        {"zero.stage": 3, "precision.param": "bf16", "resources.ranks": 8, "resources.nodes": 2},
    ),
    "deepspeed_include": (
        {"zero3.json": ZERO3},
        None,
        "deepspeed --include localhost:0,1,3 train.py --deepspeed zero3.json --per_device_train_batch_size 1",
        {"zero.stage": 3, "precision.param": "fp32", "resources.ranks": 3, "resources.nodes": 1},
    ),
    "torchrun": (
        {"zero3.json": ZERO3},
        None,
        "torchrun --nnodes=2 --nproc-per-node=8 --rdzv_backend c10d \\\n -m pkg.train --deepspeed zero3.json --bf16",
        {"zero.stage": 3, "resources.ranks": 16, "resources.nodes": 2},
    ),
    "another_script_of_accelerate": (
        *NO_FILE,
        f"{LAUNCH} --use_deepspeed --zero_stage 1 train.py --lr 3e-4 --learning_rate 1e-3 --width 64",
        {"zero.stage": 1, "precision.param": "bf16", "optimizer.lr": 0.003},  # that of conf/: the script's is not known
    ),
    "trainer_file_with_a_file": (
        {"args.json": {**ARGUMENTS, "fp16": False, "deepspeed": "ds/zero3.json"}, "ds/zero3.json": ZERO3},
        None,
        "torchrun --nproc_per_node 2 train.py args.json",
        {"zero.stage": 3, "batch.micro": 2, "resources.ranks": 2},
    ),
    "trainer_file": (
        {"args.json": ARGUMENTS},
        "args.json",
        None,
        {"zero.stage": 0, "precision.param": "fp16", "batch.micro": 2, "scheduler.min_lr_ratio": 0.1},
    ),
}
# name: (files by name, FILE and --args of the command, how each of the reasons begins)
REFUSED: dict[str, tuple[dict[str, Any], str | None, str | None, list[str]]] = {
    "accelerate_default_file": (
        *NO_FILE,
        f"{LAUNCH} train.py {TRAINED}",
        ["accelerate launch: expected --use_deepspeed, --use_fsdp, --multi_gpu or --config_file, found none"],
    ),
    "accelerate_stage_of_another_type": (
        *NO_FILE,
        f"{LAUNCH} --multi_gpu --zero_stage 3 train.py {TRAINED}",
        ["--zero_stage: Accelerate ignores it with MULTI_GPU; give --use_deepspeed"],
    ),
    "accelerate_unknown_flag": (
        *NO_FILE,
        f"{LAUNCH} --use_deepspeed --zero_stge 3 train.py",
        ["--zero_stge: unknown argument of `accelerate launch`"],
    ),
    "accelerate_twice": (
        {"zero3.json": ZERO3},
        None,
        f"{LAUNCH} --use_deepspeed --zero_stage 2 train.py --deepspeed zero3.json",
        ["--deepspeed or --fsdp of the script beside DEEPSPEED of the launcher: expected one"],
    ),
    "accelerate_file_twice": (
        {"zero3.json": ZERO3, "fsdp.yaml": ACCELERATE.format(**ALONE)},
        "fsdp.yaml",
        "train.py --deepspeed zero3.json",
        ["--deepspeed or --fsdp of the script beside FSDP of the launcher: expected one"],
    ),
    "accelerate_context_parallel": (
        {"cp.yaml": ACCELERATE.format(**{**ALONE, "cp": 2})},
        "cp.yaml",
        None,
        ["parallelism_config_cp_size: expected 1 with FSDP, found 2"],
    ),
    "accelerate_megatron": (
        *NO_FILE,
        f"{LAUNCH} --use_megatron_lm --megatron_lm_tp_degree 2 train.py",
        ["distributed_type: expected one of DEEPSPEED, FSDP"],
    ),
    "another_stage": (
        *NO_FILE,
        "deepspeed --num_gpus 8 main.py --data_path acme --zero_stage 3 --deepspeed --per_device_train_batch_size 4",
        [
            "--zero_stage: unknown to TrainingArguments, and may say how model or batch are divided",
            "--deepspeed names no file, so the script makes the configuration",
        ],
    ),
    "stage_of_a_script": (
        *NO_FILE,
        "train.py --zero_stage 2 --per_device_train_batch_size 4",
        ["--zero_stage: unknown to TrainingArguments, and may say how model or batch are divided"],
    ),
    "script_of_its_own": (
        *NO_FILE,
        "torchrun --nproc_per_node 8 train.py --lr 3e-4 --width 768 --compile",
        ["--args: expected how the model is divided, found nothing about it"],
    ),
    "launcher_alone": (*NO_FILE, "--num_gpus 4", ["--args: expected how the model is divided, found nothing about it"]),
    "hostfile": (
        {"zero3.json": ZERO3},
        None,
        "deepspeed --hostfile hosts train.py --deepspeed zero3.json",
        ["--hostfile hosts: the file is not read; give --num_nodes N --num_gpus M"],
    ),
    "another_tool": (
        {"nemo.yaml": "trainer: {devices: 8, num_nodes: 1}\nmodel: {micro_batch_size: 4}\nexp_manager: {}\n"},
        "nemo.yaml",
        None,
        ["nemo.yaml: expected a file of DeepSpeed, Accelerate or TrainingArguments, found the keys trainer"],
    ),
    "two_files": (
        {"a.json": ARGUMENTS, "b.json": ARGUMENTS},
        "a.json",
        "train.py b.json",
        ["a.json and b.json are both for the script: expected one file; leave one out"],
    ),
    "file_that_is_not_there": (
        {"a.json": {**ARGUMENTS, "deepspeed": "ds/zero3.json"}},
        "a.json",
        None,
        ["config: expected a dict or the path of a JSON file, found no file"],
    ),
    "llama_factory": (
        {"l.json": {**ARGUMENTS, "finetuning_type": "full", "cutoff_len": 256}},
        "l.json",
        None,
        ["finetuning_type full: its tool has other defaults than TrainingArguments; give learning_rate, bf16"],
    ),
    "trl": (
        *NO_FILE,
        f"{LAUNCH} --use_deepspeed --zero_stage 2 sft.py {TRAINED} --packing",
        ["--packing: its tool has other defaults than TrainingArguments"],
    ),
    "command_of_a_tool": (
        *NO_FILE,
        "trl sft --dataset_name acme --per_device_train_batch_size 4",
        ["trl: its names and defaults are not read; give its file of DeepSpeed or Accelerate"],
    ),
}


def asked(files: dict[str, Any], file: str | None, line: str | None) -> list[str]:
    """The words of the command, with its files in the current folder."""
    for name, content in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(content if isinstance(content, str) else json.dumps(content))
    return ["import", *([] if file is None else [file]), *([] if line is None else ["--args", line])]


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", RIGHT)
def test_it_becomes_the_point_that_it_describes(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    *source, expected = RIGHT[name]
    assert cli.main([*asked(*source), "--json"]) == 0, capsys.readouterr().err
    document = json.loads(capsys.readouterr().out)
    words = ["--config-dir", document["config_dir"], f"experiment={document['experiment']}"]
    (point,) = composed(arguments.split(words)).points
    assert {path: reduce(getitem, path.split("."), point.values) for path in expected} == expected


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_in_at_most_three_lines_and_nothing_is_written(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    *source, expected = REFUSED[name]
    assert cli.main(asked(*source)) == 2
    told = capsys.readouterr().err.splitlines()
    assert told.pop() == "nothing was started (exit 2)"
    reasons = [line.removeprefix("error: ") for line in told]
    assert [line[: len(part)] for line, part in zip(reasons, expected, strict=True)] == expected
    assert len(reasons) <= 3
    assert not Path("outputs").exists()


@pytest.mark.full
def test_every_flag_of_accelerates_launcher_is_known() -> None:
    launch = pytest.importorskip("accelerate.commands.launch", reason="accelerate is not installed (extra trainer)")
    options = [option for action in launch.launch_command_parser()._actions for option in action.option_strings]
    others = ("help", "module", "aws_", "tpu_", "no_tpu_", "vm")  # of hosts that are not here, or read by launchers.py
    names = {option[2:].replace("-", "_") for option in options if option.startswith("--")}
    assert len(names) > 80
    assert sorted(name for name in names if not is_flag(name) and not name.startswith(others)) == []
