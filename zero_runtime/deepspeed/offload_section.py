"""Converts the sections offload_param, offload_optimizer and aio to the runtime's OffloadPlan."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero_runtime.deepspeed.schema import Reader
from zero_runtime.offload_plan import OffloadPlan, ScratchSettings, Tier
from zero_runtime.plan import ZeroPlan

_TIERS = {"none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.NVME}
_PIPELINES = ("pipeline_read", "pipeline_write")
_AIO = {"block_size": "block_bytes", "queue_depth": "requests"}


def read_offload(
    zero: Mapping[str, Any], aio: Mapping[str, Any], plan: ZeroPlan, device: str, reader: Reader
) -> OffloadPlan:
    """Where the shards of `plan` are stored on ranks with this type of device, from zero_optimization and aio.

    Invalid values are added to the reader's problems, and keys that have no effect in this plan to its idle keys.
    """
    params, optimizer = zero.get("offload_param", {}), zero.get("offload_optimizer", {})
    if plan.keeps_full_params:
        reader.unused("zero_optimization.offload_param", params, ("device", "nvme_path"))
        params = {}
    params_tier, optimizer_tier = (_TIERS[section.get("device", "none")] for section in (params, optimizer))
    uses_nvme = Tier.NVME in (params_tier, optimizer_tier)
    if params_tier is not Tier.NVME:
        reader.unused("zero_optimization.offload_param", params, ("nvme_path",))
    if optimizer_tier is not Tier.NVME:
        reader.unused("zero_optimization.offload_optimizer", optimizer, ("nvme_path", *_PIPELINES))
    if optimizer_tier is Tier.DEVICE:
        reader.unused("zero_optimization.offload_optimizer", optimizer, ("ratio",))
    if not uses_nvme:
        reader.unused("aio", aio, _AIO)
    offload = OffloadPlan()
    with reader.collecting("zero_optimization"):
        chosen = OffloadPlan(
            params_tier,
            optimizer_tier,
            ratio=1.0 if optimizer_tier is Tier.DEVICE else float(optimizer.get("ratio", 1)),
            scratch=_scratch(params, optimizer, aio, reader) if uses_nvme else None,
        )
        chosen.check(plan, device)
        offload = chosen
    # Only a note: it decides which bytes are in which memory, and changes no results.
    if offload.ratio != 1 and params_tier is not Tier.DEVICE:
        reader.notes.append(
            f"offload_optimizer.ratio holds for offload_param too: {offload.ratio:g} of the parameters is offloaded"
        )
    return offload


def _scratch(
    params: Mapping[str, Any], optimizer: Mapping[str, Any], aio: Mapping[str, Any], reader: Reader
) -> ScratchSettings:
    """One file per rank holds all state that is offloaded to disk.

    Missing keys have the runtime's defaults: DeepSpeed's suit one thread of libaio, not threads of positioned I/O.
    """
    given = {ours: aio[theirs] for theirs, ours in _AIO.items() if theirs in aio}
    if any(name in optimizer for name in _PIPELINES):  # one depth for reads and writes
        given["ahead"] = int(any(optimizer.get(name, False) for name in _PIPELINES))
    folder = _folder([section for section in (params, optimizer) if section.get("device") == "nvme"], reader)
    with reader.collecting("aio"):
        return ScratchSettings(folder, **given)
    return ScratchSettings(folder)


def _folder(sections: list[Mapping[str, Any]], reader: Reader) -> Path:
    # Two folders are refused, because choosing one of them could fill a disk that the user meant to spare.
    found = list(dict.fromkeys(Path(section["nvme_path"]) for section in sections if section.get("nvme_path")))
    if len(found) == 1:
        return found[0]
    expected = "a folder on a drive for the ranks' scratch files"
    told = f"{found[0]} and {found[1]}; here one file holds both, so name one folder" if found else "none; name one"
    reader.problems.append(f"zero_optimization.offload_optimizer.nvme_path: expected {expected}, found {told}")
    return Path()
