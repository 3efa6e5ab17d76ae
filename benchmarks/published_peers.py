"""Bytes of one rank under the rules of Megatron and nanotron, with which published runs alone are compared.

P is the number of parameters, N the number of data-parallel ranks.

[Note: gathered inputs]
Between layers a rank has a part of the tokens, and the column layers of attention and of the MLP gather their input.
nanotron gathers it again in backward, or keeps it (`tp_recompute_allgather`, parallel/tensor_parallel/functional.py);
Megatron and this project gather again. The Playbook does not say which its runs did. Their bytes are those of kept
inputs, by all rows together (the report shows both). No number is fitted.
"""

from __future__ import annotations

from collections.abc import Iterable

from orchestrator.config.schema import RunConfig
from zero_runtime.plan import Partition, ZeroPlan
from zero_runtime.predict.memory.peers import HALF, SINGLE, PeerMemory, PeerModel, PeerParam, PeerTerm, weights_terms

GATHERS = 2  # of a block: the inputs of the column layers of attention, and of those of the MLP


def model_of_numels(blocks: Iterable[Iterable[int]], others: Iterable[int] = ()) -> PeerModel:
    """A model that is trained in full with Adam, from the numbers of elements of its parameters."""
    made = [tuple(PeerParam((numel,)) for numel in block) for block in blocks]
    return PeerModel(tuple(made), tuple(PeerParam((numel,)) for numel in others))


def megatron(model: PeerModel, world: int, *, distributed_optimizer: bool) -> PeerMemory:
    """Megatron-Core with bf16 parameters and fp32 gradients: 18P, or 6P + 12P/N with the distributed optimizer.

    Source: Megatron Core User Guide, "Distributed Optimizer", table of bytes per parameter. The gradient buffer is
    allocated once (core/distributed/param_and_grad_buffer.py).
    """
    split = -(-model.numel // world) if distributed_optimizer else model.numel
    terms = [
        PeerTerm("bf16 parameters, 2P", HALF * model.numel),
        PeerTerm("fp32 gradient buffer, 4P", SINGLE * model.numel),
        *weights_terms(model, HALF, split, "P/N" if distributed_optimizer else "P"),
    ]
    return PeerMemory("Megatron Core", tuple(terms))


def nanotron(model: PeerModel, plan: ZeroPlan, world: int) -> PeerMemory:
    """nanotron 0.5 in bf16 with fp32 accumulation: 20P, or 8P + 12P/N where the optimizer is sharded.

    Source: the Ultra-Scale Playbook, section "Zero Redundancy Optimizer" (fp32 gradients are 4P more than the paper's
    16P), and nanotron/optim/gradient_accumulator.py. It shards nothing else.
    """
    split = -(-model.numel // world) if plan.optimizer is Partition.SHARDED else model.numel
    terms = [
        PeerTerm("bf16 parameters and gradients, 4P", 2 * HALF * model.numel),
        PeerTerm("fp32 accumulated gradients, 4P", SINGLE * model.numel),
        *weights_terms(model, HALF, split, "P"),
    ]
    return PeerMemory("nanotron 0.5", tuple(terms))


def kept_inputs(config: RunConfig) -> int:
    """Bytes that a rank keeps of other ranks' tokens, as inputs of the column layers of each block."""
    model, degree = config.model.config, config.parallel.tp
    hidden = config.batch.micro * config.batch.seq * int(model["hidden_size"]) * HALF
    return GATHERS * int(model["num_hidden_layers"]) * hidden * (degree - 1) // degree
