"""Closed forms that other projects publish: the papers of ZeRO and ZeRO-Infinity, and DeepSpeed's two estimators.

Bytes are counted as their sources count them. Standard library only.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

from zero_runtime.plan import Partition, ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.state_bytes import ADAM_BYTES, BytesPerElement

# 16-bit parameters and gradients, fp32 master weights: K = 12 with Adam (arXiv 1910.02054, section 3.1).
PAPER_PRECISION = MixedPrecision("fp16", reduce="fp16", accumulate="fp16")


def paper_bytes_per_param(plan: ZeroPlan, world: int) -> float:
    """Bytes of model states per parameter and rank (arXiv 1910.02054, section 5, figure 1), from `model.py`."""
    ranks = {partition: plan.ranks_of(partition, world) for partition in Partition}
    terms = astuple(BytesPerElement.of(plan, PAPER_PRECISION, 1, ADAM_BYTES))
    return sum(size / ranks[partition] for component in terms for size, partition in component)


def largest_numel(plan: ZeroPlan, world: int, memory_bytes: float, *, model_parallel: int = 1) -> float:
    """The largest number of parameters whose states fit (arXiv 1910.02054, table 2): `model_parallel` devices share
    a model, and `world` ranks its states."""
    return model_parallel * memory_bytes / paper_bytes_per_param(plan, world)


@dataclass(frozen=True)
class InfinityModel:
    """A transformer in ZeRO-Infinity's memory model (arXiv 2104.07857, section 3): layers, width and heads."""

    layers: int
    hidden: int
    heads: int

    @property
    def numel(self) -> int:
        """Equation 1: 12 nl hd^2."""
        return 12 * self.layers * self.hidden**2

    @property
    def state_bytes(self) -> int:
        """Equation 2: 20 bytes a parameter (fp16 parameters and gradients; fp32 parameters, gradients and moments)."""
        return 20 * self.numel

    def checkpoint_bytes(self, batch: int, seq: int, every: int = 1) -> int:
        """Equation 3: activation checkpoints of `every` blocks, 2 bsz seq hd nl / ci."""
        return 2 * batch * seq * self.hidden * self.layers // every

    @property
    def state_working_bytes(self) -> int:
        """Equation 4: the largest operator's parameters and gradients, 4 hd 4 hd."""
        return 4 * self.hidden * 4 * self.hidden

    def activation_working_bytes(self, batch: int, seq: int, every: int = 1) -> int:
        """Equation 5: activations of one block between checkpoints, bsz seq ci (16 hd + 2 heads seq)."""
        return batch * seq * every * (16 * self.hidden + 2 * self.heads * seq)


@dataclass(frozen=True)
class EstimatedBytes:
    """What DeepSpeed's estimators print, in bytes: host memory of one node, memory of one GPU."""

    host: int
    gpu: int


def deepspeed_zero2_estimate(
    numel: int, gpus_per_node: int, nodes: int = 1, *, optimizer_on_host: bool, buffer_factor: float = 1.5
) -> EstimatedBytes:
    """`estimate_zero2_model_states_mem_needs` of DeepSpeed 0.19.6 (18 = 2 gradients + 16 fp32 states and gradients).

    The documentation's printed examples are of the older 4P + 16P/N (changed in pull request 5099).
    """
    gpus = gpus_per_node * nodes
    if optimizer_on_host:
        return EstimatedBytes(int(numel * max(4 * gpus, 16) * buffer_factor), 2 * numel)
    return EstimatedBytes(int(numel * 4 * gpus_per_node * buffer_factor), 2 * numel + int(18 * numel / gpus))


def deepspeed_zero3_estimate(
    numel: int,
    largest_layer: int,
    gpus_per_node: int,
    nodes: int = 1,
    *,
    params_on_host: bool,
    optimizer_on_host: bool,
    built_sharded: bool,
    buffer_factor: float = 1.5,
) -> EstimatedBytes:
    """`estimate_zero3_model_states_mem_needs` of DeepSpeed 0.19.6; `built_sharded` is its `zero_init`.

    largest_layer: elements of the module with the most parameters of its own.
    """
    gpus, share = gpus_per_node * nodes, 1 / nodes
    gathered = 4 * largest_layer
    if not optimizer_on_host:
        host = (largest_layer if built_sharded else numel) * 4 * gpus_per_node * buffer_factor
        return EstimatedBytes(int(host), gathered + int(18 * numel / gpus))
    per_param = 18 if params_on_host else 16
    per_node = per_param * share if built_sharded else max(4 * gpus_per_node, per_param * share)
    return EstimatedBytes(
        int(numel * per_node * buffer_factor), gathered + (0 if params_on_host else int(2 * numel / gpus))
    )
