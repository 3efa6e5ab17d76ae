"""The table of all rules between the groups of a configuration, and `resolve`, which fills in open settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from orchestrator import wings
from orchestrator.config import pretrained
from orchestrator.config.cluster import Cluster
from orchestrator.config.parallel import Parallel
from orchestrator.config.schema import (
    AskedConfig,
    Batch,
    Checkpoint,
    Device,
    ResolvedBatch,
    ResolvedResources,
    Resources,
    RunConfig,
)
from orchestrator.config.state_groups import Offload, Zero
from orchestrator.config.strict import Broken
from orchestrator.machine import children
from orchestrator.planning.rules import checkpoint as saving_rules
from orchestrator.planning.rules import cluster as cluster_rules
from orchestrator.planning.rules import comm as comm_rules
from orchestrator.planning.rules import data as data_rules
from orchestrator.planning.rules import hardware as hardware_rules
from orchestrator.planning.rules import inference as inference_rules
from orchestrator.planning.rules import offload as offload_rules
from orchestrator.planning.rules import optimizer as optimizer_rules
from orchestrator.planning.rules import output as output_rules
from orchestrator.planning.rules import parallel as parallel_rules
from orchestrator.planning.rules import precision as precision_rules
from orchestrator.planning.rules import training as training_rules
from orchestrator.planning.rules.scene import Scene
from orchestrator.planning.rules.unused import UNUSED
from orchestrator.records.run_record import scratch_path
from orchestrator.text.paths import expanded


def resolve(config: AskedConfig, scene: Scene) -> RunConfig:
    """The configuration with ranks, threads, batch, device and paths filled in. It must not break a rule."""
    scene = scene.on(config.hardware)
    ranks = scene.ranks(config.resources)
    batch, data, model = config.batch, config.data, pretrained.completed(config.model)
    one = batch.micro * config.parallel.batch_ranks(ranks)
    accumulation = batch.accumulation or (batch.global_size or one) // one
    seq = wings.load(wings.KINDS).labels_of(model, batch.seq)
    filled: dict[str, Any] = {
        "output": str(expanded(config.output).absolute()),
        "batch": ResolvedBatch(
            **vars(batch) | {"accumulation": accumulation, "global_size": one * accumulation, "seq": seq}
        ),
        "model": model,
        "data": replace(
            data,
            path=str(expanded(data.path).absolute()) if data.path else None,
            tokenizer=data_rules.tokenizer_of(model, data),
        ),
        "checkpoint": _with_absolute_path(config.checkpoint),
        "engine": config.engine.located(),
        "offload": _with_folder(config),
        "precision": replace(
            config.precision, compute=precision_rules.computed_in(config.precision, scene, config.resources)
        ),
        "resources": _resolved_resources(config, ranks, scene),
    }
    return RunConfig(**vars(config) | filled)


def _resolved_resources(config: AskedConfig, ranks: int, scene: Scene) -> ResolvedResources:
    asked = config.resources
    threads = asked.threads or _threads(config.cluster, ranks, scene)
    code = asked.code and str(expanded(asked.code).absolute())
    filled = {"device": scene.device(asked), "ranks": ranks, "threads": threads, "code": code}
    return ResolvedResources(**vars(asked) | filled)


def _threads(cluster: Cluster, ranks: int, scene: Scene) -> int:
    """The threads of a rank: an equal share of this machine's cores, or the cores that the cluster gives to a rank."""
    if cluster_rules.is_slurm(cluster):
        return cluster.cpus_per_rank or 1
    return max(1, scene.hardware.cores // (scene.local_world or ranks))


def _with_folder(config: AskedConfig) -> Offload:
    """Fills in the folder for scratch files, which is in the output folder if it is not given."""
    if not config.offload.uses_nvme:
        return config.offload
    folder = config.offload.folder or str(scratch_path(config.output))
    return replace(config.offload, folder=str(expanded(folder).absolute()))


def _with_absolute_path(checkpoint: Checkpoint) -> Checkpoint:
    if checkpoint.resume in ("none", "auto"):
        return checkpoint
    return replace(checkpoint, resume=str(expanded(checkpoint.resume).absolute()))


def check_parts(parts: Mapping[str, Any], scene: Scene) -> list[Broken]:
    """All rules broken by the groups in `parts`. Only rules that need a missing group are skipped.

    Without the hardware, the resources cannot be judged.
    """
    broken = []
    if "hardware" in parts:
        scene = scene.on(parts["hardware"])
    else:
        parts = {name: part for name, part in parts.items() if name != "resources"}
    if "model" in parts:
        parts = {**parts, "model": pretrained.completed(parts["model"])}
    for rule in RULES:
        if all(name in parts for name in rule.groups):
            found = rule.check(scene, *(parts[name] for name in rule.groups))
            broken.extend([found] if found else [])
    return broken


def _ranks_are_as_many_as_started(scene: Scene, resources: Resources) -> Broken | None:
    if scene.world is None or resources.ranks in (None, scene.world):
        return None
    rule = f"resources.ranks must be the number of processes started, {scene.world}"
    return Broken(rule, str(resources.ranks), (f"resources.ranks={scene.world}",))


def _code_is_a_checkout(scene: Scene, resources: Resources) -> Broken | None:
    if resources.code is None or Path(children.program_in(str(expanded(resources.code)))).is_file():
        return None
    rule = "resources.code must be a folder with a checkout of this program, such as one made by git worktree add"
    return Broken(rule, resources.code, ("resources.code=null",))


def _ranks_of_other_code_are_started_here(scene: Scene, resources: Resources, cluster: Cluster) -> Broken | None:
    if resources.code is None or (scene.world is None and not cluster_rules.is_slurm(cluster)):
        return None
    rule = "resources.code is for ranks that this command starts on this machine, not for those of SLURM or torchrun"
    return Broken(rule, resources.code, ("resources.code=null",))


def _cuda_is_there(scene: Scene, resources: Resources, cluster: Cluster) -> Broken | None:
    if resources.device is not Device.cuda or scene.hardware.gpus or cluster_rules.is_slurm(cluster):
        return None
    idle = scene.hardware.idle_gpus
    found = f"{idle} GPUs and a torch built without CUDA" if idle else "no GPU"
    fixes = (*("hardware=a100_80gb",) * scene.plan_only, "resources.device=cpu")
    return Broken("resources.device=cuda needs a GPU, here or described by hardware=NAME", found, fixes)


def _each_rank_has_a_gpu(scene: Scene, resources: Resources, cluster: Cluster) -> Broken | None:
    if cluster_rules.is_slurm(cluster) or scene.node.is_described:
        return None
    gpus = scene.hardware.gpus
    ranks = scene.local_world or scene.ranks(resources)
    if scene.device(resources) is not Device.cuda or not gpus or ranks <= gpus or scene.own_gpu:
        return None
    fewer = () if scene.world is not None else (f"resources.ranks={gpus}",)
    rule = f"resources.ranks must be at most the GPUs here, {gpus}"
    if scene.hardware.is_mig:
        rule = "resources.ranks must be 1 on a MIG device: CUDA shows a process only the first"
    return Broken(rule, str(ranks), (*fewer, "resources.device=cpu"))


def _batch_divides(scene: Scene, batch: Batch, resources: Resources, parallel: Parallel) -> Broken | None:
    if batch.global_size is None:
        return None
    ranks, name = parallel.batch_ranks(scene.ranks(resources)), "tp" if parallel.tp > 1 else "sp"
    of_group = f" (parallel.{name}={parallel.group} makes one of each {parallel.group})" if parallel.group > 1 else ""
    one = batch.micro * ranks * (batch.accumulation or 1)
    if batch.global_size == one or (batch.accumulation is None and batch.global_size % one == 0):
        return None
    if batch.accumulation is None:
        rule = f"batch.global_size must be a multiple of micro {batch.micro} x {ranks} ranks{of_group} = {one}"
        return Broken(rule, str(batch.global_size), _divisible(batch, ranks))
    product = f"micro {batch.micro} x accumulation {batch.accumulation} x {ranks} ranks{of_group} = {one}"
    free = ("batch.accumulation=null",) if batch.global_size % (batch.micro * ranks) == 0 else ()
    rule = f"batch.global_size must be {product}"
    return Broken(rule, str(batch.global_size), (f"batch.global_size={one}", *free))


def _one_reduction_has_micro_batches(
    scene: Scene, zero: Zero, batch: Batch, resources: Resources, parallel: Parallel
) -> Broken | None:
    if not zero.reduce_at_boundary:
        return None
    share = (batch.global_size or 0) // (batch.micro * parallel.batch_ranks(scene.ranks(resources)))
    many = max(batch.accumulation or 1, share) > 1
    if zero.stage >= 2 and many:
        return None
    rule = "zero.reduce_at_boundary changes nothing but in stages 2 and 3 with several micro-batches"
    return Broken(rule, f"stage {zero.stage}", ("zero.reduce_at_boundary=false",))


def _divisible(batch: Batch, ranks: int) -> tuple[str, ...]:
    """Fixes: a divisible global size, and if there is one, the nearest micro-batch that divides the present one."""
    assert batch.global_size is not None
    one = batch.micro * ranks
    fixes = [f"batch.global_size={one * math.ceil(batch.global_size / one)}"]
    if batch.global_size % ranks == 0:
        share = batch.global_size // ranks
        divisors = (n for n in range(1, share + 1) if share % n == 0)
        fixes.append(f"batch.micro={min(divisors, key=lambda n: abs(n - batch.micro))}")
    return tuple(fixes)


class Rule(NamedTuple):
    """A check, and the groups that are passed to it in this order. The check returns a broken rule or None."""

    check: Callable[..., Broken | None]
    groups: tuple[str, ...]


RULES = (
    Rule(output_rules.output_can_be_written_down, ("output",)),
    Rule(output_rules.output_is_the_user_s, ("output",)),
    Rule(output_rules.slurm_takes_the_output, ("output", "cluster")),
    Rule(_ranks_are_as_many_as_started, ("resources",)),
    Rule(_code_is_a_checkout, ("resources",)),
    Rule(_ranks_of_other_code_are_started_here, ("resources", "cluster")),
    Rule(_cuda_is_there, ("resources", "cluster")),
    Rule(_each_rank_has_a_gpu, ("resources", "cluster")),
    Rule(hardware_rules.described_gpus_are_used, ("resources", "hardware")),
    Rule(hardware_rules.a_run_has_the_described_gpus, ("resources", "cluster", "hardware")),
    Rule(hardware_rules.each_rank_has_a_described_gpu, ("resources", "cluster", "hardware")),
    Rule(hardware_rules.the_gpu_has_the_dtype, ("precision", "resources", "hardware")),
    Rule(cluster_rules.slurm_is_here, ("cluster",)),
    Rule(cluster_rules.jobs_are_not_sent_from_ranks, ("cluster",)),
    Rule(cluster_rules.one_machine_is_one_node, ("resources", "cluster")),
    Rule(cluster_rules.slurm_is_told_what_to_ask_for, ("resources", "cluster")),
    Rule(cluster_rules.ranks_spread_over_the_nodes, ("resources",)),
    Rule(cluster_rules.the_limit_leaves_time_before_the_signal, ("resources", "cluster")),
    Rule(comm_rules.comm_is_of_cpu_ranks, ("comm", "resources")),
    Rule(comm_rules.ranks_that_read_each_other_share_a_node, ("comm", "resources")),
    Rule(comm_rules.ranks_may_read_each_other, ("comm", "resources", "cluster")),
    *(Rule(one.check, (one.group,)) for one in UNUSED),
    Rule(_batch_divides, ("batch", "resources", "parallel")),
    Rule(data_rules.weights_are_there, ("model",)),
    Rule(data_rules.tokenizer_is_there, ("model", "data")),
    Rule(data_rules.adapter_can_be_made, ("adapter",)),
    Rule(data_rules.text_has_a_path, ("data",)),
    Rule(data_rules.text_is_there, ("data", "model")),
    Rule(data_rules.vocabulary_holds_bytes, ("model", "data")),
    Rule(data_rules.kind_of_model_allows, ("model", "data", "batch", "parallel", "loss", "measure", "train")),
    Rule(data_rules.validation_has_data, ("data", "measure")),
    Rule(training_rules.training_has_one_end, ("measure", "train")),
    Rule(training_rules.training_keys_are_used, ("measure", "train")),
    Rule(training_rules.training_on_the_way_is_validated, ("measure", "train")),
    Rule(training_rules.examples_have_full_layers, ("measure", "train", "parallel")),
    Rule(inference_rules.inference_shards_weights, ("zero", "measure")),
    Rule(inference_rules.inference_sends_weights_as_stored, ("zero", "measure")),
    Rule(inference_rules.inference_offloads_weights, ("offload", "measure")),
    Rule(inference_rules.evaluation_has_data, ("data", "measure")),
    Rule(inference_rules.evaluation_saves_nothing, ("checkpoint", "measure")),
    Rule(inference_rules.evaluation_has_no_new_adapters, ("adapter", "measure")),
    Rule(inference_rules.evaluation_accumulates_nothing, ("batch", "measure")),
    Rule(precision_rules.compute_is_param_or_fp32, ("precision",)),
    Rule(precision_rules.scale_keys_are_used, ("precision",)),
    Rule(precision_rules.tf32_is_used, ("precision", "resources")),
    Rule(precision_rules.shard_groups_divide_the_ranks, ("zero", "resources", "parallel")),
    Rule(precision_rules.quantised_gathers_keep_masters, ("zero", "precision")),
    Rule(precision_rules.errors_are_fed_back_in_one_scale, ("zero", "precision")),
    Rule(precision_rules.codes, ("precision", "adapter", "measure", "model", "parallel", "offload", "zero")),
    Rule(_one_reduction_has_micro_batches, ("zero", "batch", "resources", "parallel")),
    Rule(parallel_rules.tp_divides_the_ranks, ("parallel", "resources")),
    Rule(parallel_rules.optimizer_updates_slices, ("parallel", "optimizer")),
    Rule(parallel_rules.inference_has_full_layers, ("parallel", "measure")),
    Rule(parallel_rules.sp_divides_the_ranks, ("parallel", "resources")),
    Rule(parallel_rules.heads_are_divided_once, ("parallel",)),
    Rule(parallel_rules.sp_divides_the_sequences, ("parallel", "batch")),
    Rule(parallel_rules.inference_has_whole_sequences, ("parallel", "measure")),
    Rule(offload_rules.offloaded_params_are_sharded, ("offload", "zero")),
    Rule(offload_rules.optimizer_can_be_offloaded, ("offload", "optimizer", "resources")),
    Rule(offload_rules.folder_is_there, ("output", "offload", "cluster")),
    Rule(optimizer_rules.dampening_is_used, ("optimizer",)),
    Rule(optimizer_rules.optimizer_can_run, ("optimizer", "zero")),
    Rule(optimizer_rules.momentum_can_cycle, ("optimizer", "scheduler")),
    Rule(saving_rules.checkpoint_is_there, ("checkpoint",)),
    Rule(saving_rules.gathered_weights_are_whole, ("checkpoint", "adapter")),
)
