"""Writes a point as a Python file for DistributedDataParallel: how the model is replicated, and how a step is made."""

from __future__ import annotations

from orchestrator.config.schema import RunConfig
from orchestrator.wings.engines import ddp
from orchestrator.wings.foreign import loop_lines
from orchestrator.wings.foreign.exported import Exported, trained_by

DDP_FILE = "ddp_parts.py"
_IMPORTS = """from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
"""
_REPLICATE = '''
def replicate(model):
    """The model on this rank's device, in DistributedDataParallel. The process group must be there."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    ids = [device] if on_gpu else None
    for param in model.parameters():
        param.data = param.data.float()
    replicated = DistributedDataParallel(model.to(device), device_ids=ids, {settings})
    {hook}return replicated
'''
_HOOK = """replicated.register_comm_hook(None, default_hooks.{})
    """
_MICRO = """model.require_backward_grad_sync = index + 1 == len(micro_batches)  # what no_sync() sets
{loss}
(loss * dist.get_world_size()).backward()  # DDP averages over the ranks"""
_LOSS = "loss = loss_of(model, input_ids, labels) / tokens"
_AUTOCAST = "with torch.autocast(input_ids.device.type, {dtype}):\n    "


def exported(config: RunConfig, why: str) -> Exported:
    """The file for this point. Refusal: DDP, or a loop without a loss scale, cannot train it."""
    asked = trained_by(config, "ddp")
    loop_lines.refuse_loss_scale(config)
    notes = [*ddp.notes_of(asked), *loop_lines.model_notes(asked, "replicate")]
    use = f"torchrun --nproc-per-node {config.resources.ranks} train.py, with from ddp_parts import *"
    settings, param = ddp.settings_of(asked), asked.precision.dtypes.param
    hook = settings.pop("comm_hook")
    wrapper = _REPLICATE.format(
        settings=loop_lines.call_arguments(settings), hook="" if hook is None else _HOOK.format(hook)
    )
    autocast = "" if param == "fp32" else _AUTOCAST.format(dtype=loop_lines.TORCH_DTYPES[param])
    micro = _MICRO.format(loss=autocast + _LOSS)
    text = loop_lines.file(asked, why, notes, call="replicate", imports=_IMPORTS, wrapper=wrapper, micro=micro)
    return Exported({DDP_FILE: text}, notes, use)
