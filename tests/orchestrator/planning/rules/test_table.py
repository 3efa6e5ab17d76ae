"""A broken rule between configuration groups is reported with fixes that resolve it; open settings are filled in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from orchestrator.config.optimizer import Optimizer, Scheduler
from orchestrator.config.schema import AskedConfig, Device, Model, to_dict
from orchestrator.config.strict import Broken, build_parts
from orchestrator.machine import hardware
from orchestrator.machine.hardware import Hardware
from orchestrator.planning.rules import comm as comm_rules
from orchestrator.planning.rules import data as data_rules
from orchestrator.planning.rules import table as rules
from orchestrator.planning.rules.optimizer import momentum_can_cycle
from orchestrator.planning.rules.scene import Scene
from orchestrator.planning.rules.table import resolve
from zero_runtime.optim.configs import OptimizerConfig, SgdConfig, TorchConfig
from zero_runtime.optim.lr_settings import OneCycleSettings

CONF = Path(__file__).resolve().parents[4] / "conf"
LAPTOP = Scene(Hardware(cores=4, cpu="cpu"))
SERVER = Scene(Hardware(cores=16, cpu="cpu", gpus=4, gpu="H100"))
JOINED = Scene(Hardware(cores=16, cpu="cpu", gpus=4, gpu="H100"), world=8, local_world=4)
LOGIN_NODE = Scene(Hardware(cores=4, cpu="cpu", slurm=True))
PLANNED = replace(LAPTOP, plan_only=True)
A100S = Scene(Hardware(cores=16, cpu="cpu", gpus=4, gpu="A100-SXM4-80GB"))
SLURM = "cluster=slurm resources.device=cpu resources.ranks=4"
FORBIDDEN = "comm=shm resources.ranks=2"  # where processes may not read each other
OUTER = "zero=stage3 zero.shard_ranks=2 zero.outer_sharding=optim"


def check_rules(config: AskedConfig, scene: Scene) -> list[rules.Broken]:
    return rules.check_parts(vars(config), scene)


def config(line: str = "") -> AskedConfig:
    """The defaults with overrides applied, without Hydra."""
    return AskedConfig(**build_parts(AskedConfig, plain_config(line))[0])


WORDS = OverridesParser.create()


def problems(line: str, scene: Scene) -> list[Broken]:
    """The limits and rules that a line breaks."""
    parts, broken = build_parts(AskedConfig, plain_config(line))
    return broken + rules.check_parts(parts, scene)


def plain_config(line: str) -> dict[str, Any]:
    model = Model("tiny", "llama", {"vocab_size": 256, "max_position_embeddings": 1024})
    data = to_dict(AskedConfig(model=model))
    for word in line.split():
        put(data, *word.split("="))
    return data


def put(data: dict[str, Any], key: str, value: str) -> None:
    *way, last = key.split(".")
    option = CONF / key / f"{value}.yaml"
    here = data
    for name in way:
        here = here[name]
    if option.exists():
        here[last] = yaml.safe_load(option.read_text())
    else:
        here[last] = WORDS.parse_override(f"{key}={value}").value()


CODED = "zero=stage3 adapter=lora precision.weights=int8"

BROKEN = [
    (LAPTOP, "measure=eval zero=stage2", "inference has no gradients and no optimizer states"),
    (LAPTOP, "measure=eval zero=stage3 zero.gather_dtype=int8", "zero.gather_dtype is for training"),
    (LAPTOP, "measure=eval zero=stage3 offload=optimizer_nvme", "measure=eval has no optimizer states to offload"),
    (LAPTOP, "measure=eval zero=stage3 data.validation_fraction=0", "measure=eval needs held-out data"),
    (LAPTOP, "measure=eval zero=stage3 checkpoint=sharded", "measure=eval trains nothing that could be saved"),
    (LAPTOP, "measure=eval zero=stage3 adapter=lora", "measure=eval would evaluate adapters that were never trained"),
    (LAPTOP, "measure=eval zero=stage3 batch.accumulation=2", "measure=eval has one micro-batch"),
    (LAPTOP, "optimizer=onebitadam zero=stage2", "optimizer.kind=onebitadam needs each rank's full gradients"),
    (LAPTOP, "optimizer=onebitadam zero=stage1 optimizer.clip_norm=1.0", "optimizer.kind=onebitadam cannot clip"),
    (LAPTOP, "precision=fp32 zero.gather_dtype=int8", "zero.gather_dtype needs sharded parameters, or masters apart"),
    (
        LAPTOP,
        "precision=fp16 zero.reduce_dtype=int8 zero.error_feedback=true",
        "zero.error_feedback needs gradients of one scale",
    ),
    (LAPTOP, "resources.device=cuda", "resources.device=cuda needs a GPU"),
    (PLANNED, "resources.device=cuda", "fix: hardware=a100_80gb"),
    (SERVER, "resources.ranks=8", "resources.ranks must be at most the GPUs here, 4"),
    (LAPTOP, "hardware=a100_80gb", "hardware=a100_80gb needs 8 x A100-SXM4-80GB here to run; add --plan"),
    (LAPTOP, "hardware=h200 resources.device=cuda resources.nodes=2", "needs 8 x H200 here to run; add --plan"),
    (SERVER, "hardware=a100_80gb resources.ranks=2", "needs 2 x A100-SXM4-80GB here to run; add --plan"),
    (A100S, "hardware=a100_80gb", "needs 8 x A100-SXM4-80GB here to run; add --plan"),
    (SERVER, "hardware=h200 resources.ranks=6 resources.nodes=2", "needs 3 x H200 here to run; add --plan"),
    (A100S, "hardware=a100_80gb resources.ranks=6", "needs 6 x A100-SXM4-80GB here to run; add --plan"),
    (PLANNED, "hardware=a100_80gb resources.device=cpu", "describes GPUs, which resources.device must use"),
    (PLANNED, "hardware=a100_80gb resources.ranks=9", "at most the GPUs of hardware=a100_80gb, 8 x 1 nodes"),
    (PLANNED, "hardware=rtx_3090 resources.ranks=6 resources.nodes=2", "GPUs of hardware=rtx_3090, 1 x 2 nodes"),
    (A100S, "hardware=a100_80gb hardware.gpus=2 resources.ranks=4", "GPUs of hardware=a100_80gb, 2 x 1 nodes"),
    (PLANNED, "hardware=a100_80gb resources.ranks=9 resources.nodes=2", "must be a multiple of resources.nodes=2"),
    (PLANNED, "hardware=t4", "hardware=t4 has no matrix instructions for bf16"),
    (PLANNED, "hardware=v100_32gb precision.compute=bf16", "hardware=v100_32gb has no matrix instructions for bf16"),
    (PLANNED, "hardware=v100_16gb precision=fp32 precision.tf32=true", "hardware=v100_16gb has no TF32"),
    (PLANNED, "hardware.gpus=4", "hardware.name=auto is this machine and has no hardware.gpus"),
    (JOINED, "resources.ranks=2", "resources.ranks must be the number of processes started, 8"),
    (LAPTOP, SLURM, "cluster=slurm needs SLURM's sbatch on the PATH"),
    (Scene(LOGIN_NODE.hardware, 4, 4), SLURM, "cluster=slurm sends jobs and starts their ranks itself"),
    (LAPTOP, "cluster.partition=long", "cluster=local uses no cluster.partition"),
    (LAPTOP, "cluster.signal_delay_s=30", "cluster=local uses no cluster.signal_delay_s"),
    (LAPTOP, "resources.nodes=2", "resources.nodes above 1 needs cluster=slurm"),
    (LOGIN_NODE, "cluster=slurm", "cluster=slurm needs resources.device and resources.ranks"),
    (LOGIN_NODE, "cluster=slurm resources.nodes=3", "cluster=slurm needs resources.device and resources.ranks"),
    (LOGIN_NODE, f"{SLURM} resources.nodes=3", "resources.ranks must be a multiple of resources.nodes=3"),
    (LOGIN_NODE, f"{SLURM} resources.time_limit_min=2.5", "must leave 60 s of work before the signal to save"),
    (LAPTOP, "batch.global_size=10", "a multiple of micro 4 x 2 ranks = 8"),
    (LAPTOP, "batch.global_size=9", "a multiple of micro 4 x 2 ranks = 8"),
    (SERVER, "batch.global_size=24", "a multiple of micro 4 x 4 ranks = 16"),
    (LAPTOP, "batch.global_size=16 batch.accumulation=3", "micro 4 x accumulation 3 x 2 ranks = 24"),
    (LAPTOP, "batch.global_size=17 batch.accumulation=3", "micro 4 x accumulation 3 x 2 ranks = 24"),
    (LAPTOP, "data.path=here", "data=stdlib uses no data.path"),
    (LAPTOP, "data=text", "data=text needs data.path"),
    (LAPTOP, "data=text data.path=missing", "data.path must be a regular file or a folder that is there"),
    (LAPTOP, "data=text data.path=/dev/zero", "data.path must be a regular file or a folder that is there"),
    (LAPTOP, "data=text data.path=/nowhere/at/all", "data.path must be a regular file or a folder that is there"),
    (LAPTOP, "model.config.vocab_size=100", "vocab_size must be at least 256"),
    (LAPTOP, "batch.seq=2048", "batch.seq must be at most the model's max_position_embeddings, 1024"),
    (LAPTOP, "data.validation_fraction=0", "needs data.validation_fraction above 0"),
    (LAPTOP, "precision=fp32 precision.master=bf16", "precision.master must hold precision.param=fp32"),
    (LAPTOP, "precision=fp16 precision.master=fp16", "precision.master must keep updates"),
    (LAPTOP, "precision=fp16 precision.initial_scale_power=2 precision.min_loss_scale=8", "must be at most 2^initial"),
    (LAPTOP, "precision.compute=fp16", "precision.compute must be auto, fp32 or precision.param=bf16"),
    (LAPTOP, "precision.hysteresis=3", "precision.param=bf16 needs no loss scale"),
    (LAPTOP, "precision.loss_scale=128.0", "precision.param=bf16 needs no loss scale"),
    (LAPTOP, "precision=fp16 precision.loss_scale=128.0 precision.hysteresis=3", "is fixed"),
    (LAPTOP, "precision=fp32 precision.tf32=true", "precision.tf32 is for fp32"),
    (SERVER, "precision=bf16 precision.tf32=true", "precision.tf32 is for fp32"),
    (LAPTOP, "zero=stage3 zero.shard_ranks=3", "zero.shard_ranks must divide the 2 ranks"),
    (LAPTOP, "zero=stage0 zero.shard_ranks=2", "zero.shard_ranks needs a stage that shards"),
    (LAPTOP, "zero=stage3 zero.outer_sharding=optim", "zero.outer_sharding needs zero.shard_ranks"),
    (LAPTOP, "zero=stage2 zero.shard_ranks=2 zero.outer_sharding=optim", "zero.outer_sharding needs zero.stage=3"),
    (SERVER, f"{OUTER} zero.gather_dtype=int8", "zero.outer_sharding sends exact messages"),
    (SERVER, f"{OUTER} offload=param_cpu", "zero.outer_sharding keeps the parameters of a group on the device"),
    (SERVER, f"{OUTER} optimizer=muon", "optimizer.kind=muon sends parts of matrices inside a shard group"),
    (SERVER, f"{OUTER} measure=eval", "zero.outer_sharding shards gradients and optimizer states, which inference"),
    (LAPTOP, "parallel.tp=2 resources.ranks=3", "parallel.tp must divide the 3 ranks"),
    (LAPTOP, "parallel.tp=4", "parallel.tp must divide the 2 ranks"),
    (LAPTOP, "parallel.patterns=[a]", "parallel.tp=1 uses no parallel.patterns"),
    (
        SERVER,
        "parallel=tp2 zero=stage1 optimizer=onebitadam optimizer.clip_norm=null",
        "sends signs with one scale for",
    ),
    (LAPTOP, "parallel=tp2 measure=eval zero=stage3", "parallel.tp=2 is for training"),
    (SERVER, "parallel=tp2 batch.global_size=12", "a multiple of micro 4 x 2 ranks (parallel.tp=2 makes one of each"),
    (SERVER, "parallel=tp2 zero=stage3 zero.shard_ranks=4", "must divide the 2 ranks that hold the same slice"),
    (LAPTOP, "parallel.sp=2 resources.ranks=3", "parallel.sp must divide the 3 ranks"),
    (LAPTOP, "parallel.sp=4", "parallel.sp must divide the 2 ranks"),
    (SERVER, "parallel=sp2 parallel.tp=2", "parallel.tp and parallel.sp both divide the attention's heads"),
    (SERVER, "parallel.sp=4 batch.seq=30", "parallel.sp=4 must divide batch.seq"),
    (LAPTOP, "parallel=sp2 measure=eval zero=stage3", "parallel.sp=2 is for training"),
    (SERVER, "parallel=sp2 batch.global_size=12", "a multiple of micro 4 x 2 ranks (parallel.sp=2 makes one of each"),
    (LAPTOP, "zero.reduce_at_boundary=true", "zero.reduce_at_boundary changes nothing but"),
    (LAPTOP, "zero=stage1 zero.reduce_at_boundary=true batch.accumulation=2", "zero.reduce_at_boundary changes"),
    (LAPTOP, "scheduler=constant scheduler.warmup_steps=3", "scheduler=constant has no scheduler.warmup_steps"),
    (LAPTOP, "scheduler=warmup scheduler.min_lr_ratio=0.1", "scheduler=warmup has no scheduler.min_lr_ratio"),
    (LAPTOP, "scheduler=warmup scheduler.warmup_type=null", "scheduler=warmup needs scheduler.warmup_type"),
    (LAPTOP, "scheduler=cosine scheduler.staircase=false", "scheduler=cosine has no scheduler.staircase"),
    (LAPTOP, "scheduler=one_cycle scheduler.momentum_min=null", "scheduler.momentum_max needs scheduler.momentum_min"),
    (LAPTOP, "scheduler=one_cycle scheduler.decay_rate=0.1", "scheduler.decay_rate needs scheduler.decay_steps"),
    (LAPTOP, "scheduler=one_cycle scheduler.momentum_min=0.97", "momentum_min must be at most momentum_max=0.95"),
    (LAPTOP, "scheduler=one_cycle optimizer=sgd optimizer.momentum=0.0", "momentum_max cycles a momentum"),
    (LAPTOP, "scheduler=one_cycle optimizer=torch", "momentum_max cycles a momentum"),
    (LAPTOP, "optimizer=adamw optimizer.momentum=0.9", "optimizer=adamw has no optimizer.momentum"),
    (LAPTOP, "optimizer=sgd optimizer.beta2=0.9", "optimizer=sgd has no optimizer.beta2"),
    (LAPTOP, "optimizer=sgd optimizer.momentum=2.0", "optimizer.momentum must be from 0 to below 1"),
    (LAPTOP, "optimizer=sgd optimizer.momentum=0.9 optimizer.dampening=-1.0", "dampening must be from 0 to 1"),
    (LAPTOP, "optimizer.weight_decay=1000.0", "optimizer.weight_decay x optimizer.lr must be at most 1"),
    (LAPTOP, "resources.threads=100000", "resources.threads must be from 1 to 4096"),
    (LAPTOP, "optimizer=lion optimizer.eps=1e-8", "optimizer=lion has no optimizer.eps"),
    (LAPTOP, "optimizer=lamb optimizer.eps=null", "optimizer=lamb needs optimizer.eps"),
    (LAPTOP, "optimizer=sgd optimizer.momentum=0 optimizer.nesterov=true", "nesterov needs optimizer.momentum above 0"),
    (
        LAPTOP,
        "optimizer=sgd optimizer.momentum=0 optimizer.dampening=0.5",
        "dampening needs optimizer.momentum above 0",
    ),
    (LAPTOP, "optimizer=sgd optimizer.dampening=0.5 optimizer.nesterov=true", "nesterov needs optimizer.dampening=0.0"),
    (LAPTOP, "optimizer=torch optimizer.name=Muon", "Muon cannot run on shards of parameters: it orthogonalises"),
    (LAPTOP, "optimizer=torch optimizer.name=Adagard", "Adagard cannot run on shards of parameters: it is not known"),
    (LAPTOP, "optimizer=torch optimizer.name=null", "optimizer=torch needs optimizer.name"),
    (
        LAPTOP,
        "optimizer=torch optimizer.name=Rprop optimizer.weight_decay=0.1",
        "torch.optim.Rprop has no weight decay",
    ),
    (LAPTOP, "checkpoint.resume=misssing", "checkpoint.resume must be none, auto or the folder of a checkpoint"),
    (LAPTOP, "checkpoint.resume=step-1/index.json", "none, auto or the folder of a checkpoint"),
    (LAPTOP, "checkpoint.resume=misssing/step-1", "checkpoint.resume must be none, auto or the folder of a checkpoint"),
    (LAPTOP, "checkpoint.every=5", "checkpoint=none uses no checkpoint.every"),
    (LAPTOP, "output=/tmp", "output must be yours, and neither it nor what holds it everybody's to write to"),
    (LAPTOP, "output='no\udcfftext'", "output must be a path in UTF-8"),
    (LOGIN_NODE, f"{SLURM} output=runs%j", "cluster=slurm needs an output without % and control characters"),
    (LAPTOP, "data=synthetic data.path=here", "data=synthetic uses no data.path"),
    (LAPTOP, "tracking=none tracking.uri=here", "tracking=none uses no tracking.uri"),
    (LAPTOP, "offload=param_cpu", "offload.params=cpu needs zero=stage3"),
    (LAPTOP, "zero.stage=3 offload.params=nvme", "offload.params=nvme needs offload.optimizer=nvme"),
    (LAPTOP, "offload=optimizer_nvme optimizer=lamb", "needs an optimizer that updates one unit after another"),
    (SERVER, "offload=optimizer_cpu optimizer=lamb", "offload to cpu needs an optimizer that updates one unit after"),
    (SERVER, "zero=stage3 offload=param_cpu optimizer=torch", "offload to cpu needs an optimizer that updates one"),
    (LAPTOP, "resources.code=conf", "resources.code must be a folder with a checkout"),
    (LOGIN_NODE, f"resources.code={CONF.parent} {SLURM}", "resources.code is for ranks that this command starts"),
    (LAPTOP, "offload.folder=here", "offload without nvme uses no offload.folder"),
    (LAPTOP, "offload=optimizer_nvme offload.folder=fasst", "offload.folder must exist"),
    (LAPTOP, "offload=optimizer_nvme offload.folder=here", "offload.folder must exist"),
    (LAPTOP, "offload.ratio=0.5", "offload=none uses no offload.ratio"),
    (LAPTOP, "loss.tile=64", "loss=full uses no loss.tile"),
    (LAPTOP, "measure=train", "measure=train needs an end: train.max_steps or train.epochs"),
    (LAPTOP, "measure=train train.max_steps=9 train.epochs=1", "measure=train has one end"),
    (LAPTOP, "train.max_steps=9", "train.max_steps is for measure=train without measure.steps, which trains to an end"),
    (LAPTOP, "measure=train measure.steps=4 train.max_steps=9", "train.max_steps is for measure=train without measure"),
    (
        LAPTOP,
        "measure=train train.max_steps=9 train.eval_every=3 measure.validation_batches=0",
        "train.eval_every validates, which measure.validation_batches=0 turns off",
    ),
    (LAPTOP, "measure=train train.epochs=1 parallel=tp2 resources.ranks=2", "train.examples are generated with full"),
    (LAPTOP, "measure=train train.epochs=1 measure.rounds=3", "measure.rounds must be 1 without measure.steps"),
    (LAPTOP, "measure=eval zero=stage3 measure.steps=null", "measure.kind=eval needs measure.steps"),
    (LAPTOP, "train.keep_best=false", "train.keep_best is for measure=train"),
    (LAPTOP, "data=pairs", "data=pairs needs data.path=FILE_OR_FOLDER"),
    (LAPTOP, "data=pairs data.path=fast", "data.path must be a folder with files of .json"),
    (LAPTOP, "model=pretrained", "model=pretrained needs model.path=FOLDER"),
    (LAPTOP, "data.tokenizer=model", "data.tokenizer=model needs a model.path with a tokenizer"),
    (LAPTOP, "data=synthetic data.tokenizer=model", "data=synthetic makes tokens and reads no text"),
    (LAPTOP, "adapter=lora", "adapter=lora needs the package peft"),
    (LAPTOP, "precision.weights=int4", "precision.weights=int4 trains with adapter=lora: the quantised weights are"),
    (LAPTOP, f"{CODED} parallel=tp2 resources.ranks=2", "precision.weights=int8 keeps whole matrices on the device"),
    (LAPTOP, f"{CODED} zero.gather_dtype=int8", "precision.weights=int8 gathers codes as they are stored"),
    (SERVER, "comm=gloo", "comm=gloo is for ranks on CPUs: GPUs use NCCL"),
    (SERVER, "comm=shm", "comm=shm is for ranks on CPUs: GPUs use NCCL"),
    (LOGIN_NODE, f"{SLURM} comm=shm resources.nodes=2", "comm=shm is for ranks of one node, which have one memory"),
    (JOINED, "comm=shm resources.device=cpu", "comm=shm is for ranks of one node, which have one memory"),
    (LAPTOP, FORBIDDEN, "comm=shm needs ranks that may read each other's memory"),
    (LAPTOP, "adapter=lora checkpoint.weights=bf16", "checkpoint.weights gathers a whole model"),
]


@pytest.mark.parametrize(("scene", "line", "told"), BROKEN)
def test_a_broken_rule_is_reported_and_each_of_its_fixes_resolves_it(
    scene: Scene, line: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "misssing").write_text("text")
    (tmp_path / "here").write_text("text")
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "index.json").touch()
    (tmp_path / "fast").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(data_rules, "is_installed", lambda _: line != "adapter=lora")
    monkeypatch.setattr(comm_rules, "load", lambda _: lambda: "a reason" if line == FORBIDDEN else "")
    broken = problems(line, scene)
    assert len(broken) == 1
    assert told in str(broken[0])
    assert broken[0].fix
    for fix in broken[0].fix:
        assert problems(f"{line} {fix}", scene) == []


def test_every_rule_has_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_rules, "is_installed", lambda _: False)
    monkeypatch.setattr(comm_rules, "load", lambda _: lambda: "a reason")
    cases = [(scene, build_parts(AskedConfig, plain_config(line))[0]) for scene, line, _ in BROKEN]
    assert len(rules.RULES) <= len(cases)
    for rule in rules.RULES:
        built = [(scene, parts) for scene, parts in cases if parts.keys() >= set(rule.groups)]
        assert any(rule.check(scene, *(parts[name] for name in rule.groups)) for scene, parts in built), rule


def test_states_can_be_offloaded_to_a_file_on_every_device() -> None:
    for line in ("offload=optimizer_nvme", "zero=stage3 offload=optimizer_param_nvme"):
        for scene in (LAPTOP, SERVER):
            assert not check_rules(config(line), scene)


def test_the_defaults_break_no_rule_anywhere() -> None:
    for scene in (LAPTOP, SERVER, JOINED):
        assert check_rules(config(), scene) == []


def test_all_broken_rules_are_reported_together() -> None:
    line = "data=text batch.global_size=10 precision=fp32 precision.master=bf16 resources.device=cuda"
    assert len(problems(line, LAPTOP)) == 4


def test_a_group_that_cannot_be_built_hides_no_other_broken_rule() -> None:
    data = to_dict(config("data=text"))
    data["batch"]["micro"] = 0
    parts, broken = build_parts(AskedConfig, data)
    told = [str(one) for one in broken + rules.check_parts(parts, LAPTOP)]
    assert len(told) == 2
    assert "batch.micro" in told[0]
    assert "data=text needs" in told[1]


@pytest.mark.parametrize(
    ("scene", "line", "expected"),
    [
        (LAPTOP, "", (Device.cpu, 2, 2, 1, 8)),
        (LAPTOP, "resources.ranks=3", (Device.cpu, 3, 1, 1, 12)),
        (LAPTOP, "resources.ranks=8", (Device.cpu, 8, 1, 1, 32)),
        (LAPTOP, "batch.global_size=24", (Device.cpu, 2, 2, 3, 24)),
        (LAPTOP, "batch.accumulation=2 resources.threads=4", (Device.cpu, 2, 4, 2, 16)),
        (LAPTOP, "batch.accumulation=2 batch.global_size=16", (Device.cpu, 2, 2, 2, 16)),
        (SERVER, "", (Device.cuda, 4, 4, 1, 16)),
        (SERVER, "resources.device=cpu", (Device.cpu, 2, 8, 1, 8)),
        (SERVER, "parallel=tp2", (Device.cuda, 4, 4, 1, 8)),
        (SERVER, "parallel=tp2 batch.global_size=24", (Device.cuda, 4, 4, 3, 24)),
        (SERVER, "parallel=sp2", (Device.cuda, 4, 4, 1, 8)),
        (SERVER, "parallel.sp=4 zero=stage3 zero.shard_ranks=4", (Device.cuda, 4, 4, 1, 4)),
        (JOINED, "", (Device.cuda, 8, 4, 1, 32)),
        (PLANNED, "hardware=a100_80gb resources.nodes=2", (Device.cuda, 16, 1, 1, 64)),
        (A100S, "hardware=a100_80gb hardware.gpus=4", (Device.cuda, 4, 4, 1, 16)),
        (LOGIN_NODE, "cluster=slurm hardware=h200 resources.nodes=2", (Device.cuda, 16, 1, 1, 64)),
        (LOGIN_NODE, SLURM, (Device.cpu, 4, 1, 1, 16)),
        (PLANNED, SLURM, (Device.cpu, 4, 1, 1, 16)),
        (LOGIN_NODE, f"{SLURM} cluster.cpus_per_rank=6 resources.device=cuda", (Device.cuda, 4, 6, 1, 16)),
    ],
)
def test_open_settings_are_filled_in(scene: Scene, line: str, expected: tuple[Any, ...]) -> None:
    done = resolve(config(line), scene)
    found = (done.resources.device, done.resources.ranks, done.resources.threads)
    assert (*found, done.batch.accumulation, done.batch.global_size) == expected
    assert check_rules(done, scene) == []
    assert resolve(done, scene) == done


def test_a_missing_scratch_folder_is_refused_with_the_nearest_name_and_a_command_to_create_it(tmp_path: Path) -> None:
    (tmp_path / "fast").mkdir()
    line = f"offload=optimizer_nvme offload.folder={tmp_path}/fasst"
    [broken] = check_rules(config(line), LAPTOP)
    assert broken.found == (
        f"none (of its path only {tmp_path} exists); correct the path, or make the folder: mkdir -p {tmp_path}/fasst"
    )
    assert broken.fix == (f"offload.folder={tmp_path}/fast", "offload.folder=null")
    # On a cluster the disk may exist on the nodes only, so each rank checks the folder there.
    assert check_rules(config(f"{line} {SLURM}"), LOGIN_NODE) == []
    # The default folder is inside the output, so the program creates it; a resolved configuration names it.
    done = resolve(config(f"offload=optimizer_nvme output={tmp_path}/out"), LAPTOP)
    assert done.offload.folder == f"{tmp_path}/out/scratch"
    assert check_rules(done, LAPTOP) == []


def test_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = resolve(config("data=text data.path=some.txt output=there"), LAPTOP)
    assert (done.data.path, done.output) == (str(tmp_path / "some.txt"), str(tmp_path / "there"))


@pytest.mark.parametrize(
    ("setting", "left"),
    [
        (None, ["a", "b"]),
        ("", []),
        ("-1", []),
        ("1", ["b"]),
        ("1,0", ["b", "a"]),
        ("0,7,1", ["a"]),
        ("GPU-8f2", ["a"]),
        ("MIG-8f2,MIG-8f3", ["a-MIG"]),
    ],
)
def test_cuda_visible_devices_selects_the_same_gpus_as_cuda(setting: str | None, left: list[str]) -> None:
    assert hardware.visible(["a", "b"], setting) == left


def test_hardware_names_are_short() -> None:
    assert hardware.short_name("NVIDIA H100 80GB HBM3") == "H100-80GB-HBM3"
    assert hardware.short_name("Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz") == "Intel-Xeon-Platinum-8481C"
    assert SERVER.hardware.name(Device.cuda) == "H100"
    assert SERVER.hardware.name(Device.cpu) == "cpu/16-cores"


def test_this_machine_has_a_core_and_a_name() -> None:
    found = hardware.detect({})
    assert found.cores >= 1
    assert found.cpu


def test_gpus_are_read_from_the_drivers_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for bus in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "information").write_text("Model: \t\t NVIDIA H200\nIRQ: 1\n")
    monkeypatch.setattr(hardware, "PROC_GPUS", tmp_path)
    monkeypatch.setattr(hardware, "torch_has_cuda", lambda: False)
    assert hardware.detect({}).idle_gpus == 2
    monkeypatch.setattr(hardware, "torch_has_cuda", lambda: True)
    found = hardware.detect({"CUDA_VISIBLE_DEVICES": "0"})
    assert (found.gpus, found.gpu, found.idle_gpus) == (1, "H200", 0)


@pytest.mark.parametrize(
    ("group", "key", "told"),
    [
        ("data", "path", "data.path must be a regular file or a folder"),
        ("model", "path", "model.path must be a folder that is there"),
        ("checkpoint", "resume", "checkpoint.resume must be none, auto or the folder of a checkpoint"),
        ("offload", "folder", "offload.folder"),
    ],
)
@pytest.mark.parametrize("path", ["~nobody-of-this-name/x", "a\0b", "\ud800"])
def test_an_impossible_path_is_refused_like_a_missing_one(group: str, key: str, told: str, path: str) -> None:
    data = to_dict(config("data=text offload=optimizer_nvme"))
    data["data"]["path"] = str(CONF)
    data[group][key] = path
    assert any(told in str(one) for one in check_rules(AskedConfig(**build_parts(AskedConfig, data)[0]), LAPTOP))


@pytest.mark.parametrize(("rule", "name"), [(SgdConfig(), "sgd"), (TorchConfig("Adagrad"), "torch.optim.Adagrad")])
def test_an_optimizer_without_momentum_is_named_as_it_is_typed(rule: OptimizerConfig, name: str) -> None:
    scheduler = Scheduler(OneCycleSettings(momentum_min=0.8, momentum_max=0.9))
    broken = momentum_can_cycle(LAPTOP, Optimizer(rule=rule), scheduler)
    assert broken is not None
    assert broken.found == f"{name} without one"
