"""Writes a point as a Python file for FSDP2: which modules are sharded, in which dtypes, and how a step is made."""

from __future__ import annotations

from typing import Any

from orchestrator.config.schema import RunConfig
from orchestrator.wings.engines import fsdp2
from orchestrator.wings.foreign import loop_lines
from orchestrator.wings.foreign.exported import Exported, trained_by

FSDP2_FILE = "fsdp2_parts.py"
_IMPORTS = """from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
"""
_SHARD = '''
def blocks(model):
    """A transformer's layers: the members of the outermost lists of several modules of one class."""
    found = {{}}
    for path, one in model.named_modules():
        alike = isinstance(one, nn.ModuleList) and len(one) > 1 and len({{type(block) for block in one}}) == 1
        calls = alike and not isinstance(one[0], (nn.ModuleList, nn.ModuleDict))
        if calls and not any(path.startswith(f"{{outer}}.") for outer in found):
            found[path] = one
    return [block for one in found.values() for block in one]


def shard(model):
    """Shards the model in place, block by block, and returns it. The process group must be there."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = {mesh}
    policy = MixedPrecisionPolicy({policy})
    offload = {offload}
    for param in model.parameters():  # masters are in fp32; what is not trained is held as it is gathered
        param.data = param.data.to(torch.float32 if param.requires_grad else {param})
    for module in [*blocks(model), model]:
        # None is false for the root alone: its backward would gather at once what its forward has let go.
        reshard = None if module is model else {reshard!r}
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=offload)
        # Sums, as the loss is this rank's share: a mean would round once more.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    return model
'''
_MICRO = """last = index + 1 == len(micro_batches)
model.set_requires_gradient_sync({sync})
model.set_requires_all_reduce(last)
model.set_reshard_after_backward({reshard})
loss = loss_of(model, input_ids, labels) / tokens
loss.backward()"""
_ALL = "init_device_mesh(device, (dist.get_world_size(),))"
_GROUPS = 'init_device_mesh(device, (dist.get_world_size() // {0}, {0}), mesh_dim_names=("replicate", "shard"))'
# The norm of what is offloaded is summed in host memory.
_WITH_HOST = (
    f'DeviceMesh.from_group(dist.new_group(backend="cpu:gloo,cuda:nccl"), device) if device == "cuda" else {_ALL}'
)


def exported(config: RunConfig, why: str) -> Exported:
    """The file for this point. Refusal: FSDP2, or a loop without a loss scale, cannot train it."""
    asked = trained_by(config, "fsdp2")
    loop_lines.refuse_loss_scale(config)
    notes = [*fsdp2.notes_of(asked), *loop_lines.model_notes(asked, "shard")]
    use = f"torchrun --nproc-per-node {config.resources.ranks} train.py, with from fsdp2_parts import *"
    keys = fsdp2.settings_of(asked)
    micro = _MICRO.format(
        sync=_always_or_last(keys["requires_gradient_sync"]), reshard=_always_or_last(keys["reshard_after_backward"])
    )
    text = loop_lines.file(
        asked, why, notes, call="shard", imports=_IMPORTS, wrapper=_wrapper(asked, keys), micro=micro
    )
    return Exported({FSDP2_FILE: text}, notes, use)


def _wrapper(config: RunConfig, keys: dict[str, Any]) -> str:
    dtypes = {key: f"torch.{keys[key]}" for key in ("param_dtype", "reduce_dtype")}
    policy = {**dtypes, "cast_forward_inputs": keys["cast_forward_inputs"]}
    shards = config.zero.shard_ranks
    whole = _WITH_HOST if keys["offload"] else _ALL
    return _SHARD.format(
        mesh=whole if shards in (None, config.ranks) else _GROUPS.format(shards),
        policy=", ".join(f"{key}={value}" for key, value in policy.items()),
        offload=f"CPUOffloadPolicy(pin_memory={keys['pin_memory']})" if keys["offload"] else "OffloadPolicy()",
        param=dtypes["param_dtype"],
        reshard=keys["reshard_after_forward"],
    )


def _always_or_last(always: bool) -> str:
    return "True" if always else "last"
