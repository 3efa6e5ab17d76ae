"""Bytes of one rank under other engines' rules, as sums of named terms: FSDP2, DDP, plain PyTorch; DeepSpeed's are in
peer_deepspeed.py.

The rules are read from the engines' sources and documents, which each function names. What a rank holds between its
last backward and the step (`states`) is compared with counted tensors by tests/orchestrator/wings/engines;
`benchmarks/published.py` compares peaks with published measurements. Standard library only.

P is the number of parameters, T of those that are trained, N the number of data-parallel ranks. With 16-bit weights the
optimizer updates fp32 masters; in fp32 the weights are their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from math import prod
from typing import NamedTuple

HALF, SINGLE = 2, 4  # bytes of a 16-bit and of an fp32 number
ADAM = 2.0 * SINGLE  # bytes of exp_avg and exp_avg_sq for a trained element
PARAMS, GRADS, OPTIMIZER = "params", "grads", "optimizer"
COPIES = "copies in the optimizer's step"


class Moment(Enum):
    """When a term is allocated."""

    ALWAYS = "always"
    GRADIENTS = "gradients"  # from backward to the step; from the first backward on if micro-batches accumulate
    COMPUTE = "compute"  # in forward and backward
    STEP = "step"  # in the optimizer's step


@dataclass(frozen=True)
class PeerTerm:
    """One line of a prediction: what is allocated, how many bytes, and when. state: the component of the model states
    that the term is; empty for what is none. on_host: in the host's memory, by offload. each: bytes of an element, if
    the term holds the parameters of the units that were last used, as many as its bytes are, or in a step a tensor for
    each parameter; 0 for one tensor."""

    what: str
    nbytes: int
    moment: Moment = Moment.ALWAYS
    state: str = ""
    on_host: bool = False
    each: int = 0


class StepForm(NamedTuple):
    """How torch's optimizer steps (`word`), and the most copies that it then holds of its largest group of parameters
    and of its largest parameter."""

    word: str = "fused"
    of_group: int = 0
    of_param: int = 0


FUSED = StepForm()  # its kernel updates each element alone


class PeerParam(NamedTuple):
    """A parameter of the full model. decays: whether the optimizer has it in its group with weight decay."""

    shape: tuple[int, ...]
    trained: bool = True
    decays: bool = True

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def rows_of(self, world: int) -> int:
        """Elements of the first of `world` equal parts by its first dimension, which is the largest part."""
        first = self.shape[0] if self.shape else 1
        return -(-first // world) * (self.numel // first)


@dataclass(frozen=True)
class PeerModel:
    """The parameters in the order of forward: of each repeated block, and all others. state_bytes: of the optimizer's
    states for a trained element. by_default: the optimizer steps in torch's default form, not as in our runs."""

    blocks: tuple[tuple[PeerParam, ...], ...]
    others: tuple[PeerParam, ...] = ()
    state_bytes: float = ADAM
    by_default: bool = False

    @property
    def params(self) -> list[PeerParam]:
        return [*self.others, *(param for block in self.blocks for param in block)]

    @property
    def numel(self) -> int:
        return sum(param.numel for param in self.params)

    @property
    def trained(self) -> list[PeerParam]:
        return [param for param in self.params if param.trained]

    @property
    def trained_numel(self) -> int:
        return sum(param.numel for param in self.trained)

    @property
    def largest_block(self) -> int:
        return max((sum(param.numel for param in block) for block in self.blocks), default=0)

    @property
    def largest_trained_block(self) -> int:
        return max((sum(param.numel for param in block if param.trained) for block in self.blocks), default=0)

    @property
    def largest(self) -> int:
        """Elements of the largest trained parameter."""
        return max((param.numel for param in self.trained), default=0)

    def group_shard(self, world: int, multiple: int) -> int:
        """Elements of a rank's equal part of the optimizer's groups, each flattened and padded to a multiple."""
        groups = [sum(one.numel for one in self.trained if one.decays is decays) for decays in (True, False)]
        return sum(-(-group // multiple) * multiple // world for group in groups)


@dataclass(frozen=True)
class PeerMemory:
    """The terms of one rank under one engine."""

    engine: str
    terms: tuple[PeerTerm, ...]

    def at(self, *moments: Moment) -> int:
        """Bytes on the device of the terms that are allocated at one of the moments."""
        return sum(term.nbytes for term in self.terms if term.moment in moments and not term.on_host)

    @property
    def host_bytes(self) -> int:
        """Bytes in the host's memory, by offload."""
        return sum(term.nbytes for term in self.terms if term.on_host)

    @property
    def states(self) -> dict[str, int]:
        """Bytes of the model states on the device by component, between the last backward and the step."""
        found = dict.fromkeys((PARAMS, GRADS, OPTIMIZER), 0)
        for term in self.terms:
            if term.state and not term.on_host:
                found[term.state] += term.nbytes
        return found

    @property
    def resting(self) -> int:
        """Bytes between the last backward and the step, as in arXiv 1910.02054, section 3.1, without temporaries."""
        return self.at(Moment.ALWAYS, Moment.GRADIENTS)

    def worst(self, activations: int = 0, *, micro_batches: int = 1) -> tuple[Moment, ...]:
        """The moments whose terms exist at the worst time of a step: in compute, with the peak of one micro-batch's
        activations (bytes), or in the optimizer's step. Gradients exist in compute if earlier micro-batches left
        them."""
        kept = (Moment.GRADIENTS,) if micro_batches > 1 else ()
        compute, step = (Moment.ALWAYS, Moment.COMPUTE, *kept), (Moment.ALWAYS, Moment.GRADIENTS, Moment.STEP)
        return compute if self.at(*compute) + activations >= self.at(*step) else step

    def peak(self, activations: int = 0, *, micro_batches: int = 1) -> int:
        """Bytes allocated then."""
        moments = self.worst(activations, micro_batches=micro_batches)
        return self.at(*moments) + (activations if Moment.COMPUTE in moments else 0)


def weights_terms(model: PeerModel, weights: int, trained: int, what: str, masters: int = SINGLE) -> Iterator[PeerTerm]:
    """The terms of the optimizer for so many trained elements on this rank: states, and masters of 16-bit weights.
    weights, masters: bytes of an element of those that compute, and of the masters."""
    if weights == HALF:
        name = f"{'fp32' if masters == SINGLE else '16-bit'} master weights, {masters}{what}"
        yield PeerTerm(name, masters * trained, state=OPTIMIZER)
    states = round(model.state_bytes * trained)
    yield PeerTerm(f"optimizer's states, {model.state_bytes:g}{what}", states, state=OPTIMIZER)


def step_terms(model: PeerModel, form: StepForm, itemsize: int, world: int = 1) -> Iterator[PeerTerm]:
    """The copies that torch's optimizer makes in its step of what a rank updates, `itemsize` bytes an element.

    Source: torch/optim. Each group is updated alone; foreach takes the root of all its second moments at once.
    """
    rows = [(one.decays, one.rows_of(world)) for one in model.trained]
    group = max((sum(numel for own, numel in rows if own is decays) for decays in (True, False)), default=0)
    numel = form.of_group * group + form.of_param * max((numel for _, numel in rows), default=0)
    if numel:
        yield PeerTerm(f"{COPIES} ({form.word})", itemsize * numel, Moment.STEP, each=itemsize)


def placed(host: bool, terms: Iterable[PeerTerm]) -> Iterator[PeerTerm]:
    """The terms, in the host's memory if `host`."""
    return (replace(term, on_host=host) for term in terms)


def fsdp2(
    model: PeerModel,
    world: int,
    gather_bytes: int = HALF,
    reduce_bytes: int = SINGLE,
    held_bytes: int = SINGLE,
    *,
    reshards: bool = True,
    keeps_grads: bool = False,
    on_host: bool = False,
    step: StepForm = FUSED,
) -> PeerMemory:
    """FSDP2 (`fully_shard` on every block and on the model), torch 2.13. Trained parameters and so their gradients are
    in `held_bytes`, frozen ones as they are gathered; MixedPrecisionPolicy has `gather_bytes` for param_dtype and
    `reduce_bytes` for reduce_dtype (all: bytes of an element). reshards: after forward. keeps_grads: earlier
    micro-batches leave unsharded gradients (`set_requires_gradient_sync(False)`). on_host: CPUOffloadPolicy.

    Source: torch/distributed/fsdp/_fully_shard. A rank has whole rows of each parameter (`_init_sharded_param`: rank 0
    the most). The all-gather of the next block is issued before the current one is used, and its result is copied out
    into the parameters (`foreach_all_gather`, `foreach_all_gather_copy_out`); the previous result is freed one block
    later (`AllGatherState`). `foreach_reduce` copies a block's gradients into the reduce-scatter's input, which exists
    until the next block's. The root is not resharded after forward.
    """
    block, root = model.largest_block, sum(one.numel for one in model.others)
    shard, trained = (sum(one.rows_of(world) for one in params) for params in (model.params, model.trained))
    gathered = block if reshards else model.numel - root
    held, state = "fp32" if held_bytes == SINGLE else "16-bit", PARAMS if gather_bytes == held_bytes else OPTIMIZER
    states = [
        PeerTerm(f"{held} parameters, {held_bytes}T/N", held_bytes * trained, state=state),
        PeerTerm("frozen parameters", gather_bytes * (shard - trained), state=PARAMS),
        PeerTerm("optimizer's states", round(model.state_bytes * trained), state=OPTIMIZER),
        PeerTerm(f"gradients, {held_bytes}T/N", held_bytes * trained, Moment.GRADIENTS, GRADS),
        *step_terms(model, step, held_bytes, world),
    ]

    def whole(what: str, each: int, numel: int) -> PeerTerm:
        return PeerTerm(what, each * numel, Moment.COMPUTE, each=each)

    terms = [
        *placed(on_host, states),
        PeerTerm("unsharded parameters of the root", gather_bytes * root, Moment.COMPUTE),
        whole("unsharded parameters of the blocks in use", gather_bytes, gathered),
        whole("all-gather of the next block", gather_bytes, block + -(-block // world)),
        whole("unsharded gradients of a block", gather_bytes, model.largest_trained_block),
        whole("reduce-scatter's input", reduce_bytes, model.largest_trained_block),
    ]
    if keeps_grads:
        kept = reduce_bytes * model.trained_numel
        terms.append(PeerTerm("unsharded gradients of earlier micro-batches", kept, Moment.COMPUTE))
    return PeerMemory("FSDP2 2.13", tuple(terms))


def ddp(
    model: PeerModel,
    *,
    weights: int = HALF,
    held: int = SINGLE,
    views: bool = True,
    accumulates: bool = False,
    step: StepForm = FUSED,
) -> PeerMemory:
    """DistributedDataParallel: fp32 parameters, gradients and optimizer's states, 16P; in 16 bits by autocast. held:
    bytes of an element of what is trained and of its gradients; with 2 the model is in 16 bits, without autocast.

    Sources: torch's documentation of DistributedDataParallel (views: with `gradient_as_bucket_view` the gradients are
    views of the buckets, which stay; without it the buckets are a second copy of them, 4T. accumulates: those of
    micro-batches under `no_sync` are tensors of their own until the last one copies them to the buckets) and of
    autocast (16-bit copies of the trained weights are part of the activations, which keep them for backward; the others
    are held in 16 bits).
    """
    trained = model.trained_numel
    autocast = weights < held  # fp32 weights that compute in 16 bits are masters
    name = "fp32" if held == SINGLE else "16-bit"
    terms = [
        PeerTerm(f"{name} parameters, {held}T", held * trained, state=OPTIMIZER if autocast else PARAMS),
        PeerTerm("frozen parameters", weights * (model.numel - trained), state=PARAMS),
        PeerTerm("optimizer's states", round(model.state_bytes * trained), state=OPTIMIZER),
        PeerTerm(f"buckets of gradients, {held}T", held * trained, state=GRADS if views else ""),
        *step_terms(model, step, held),
    ]
    if not views:
        terms.append(PeerTerm(f"gradients, {held}T", held * trained, Moment.GRADIENTS, GRADS))
    elif accumulates:
        terms.append(PeerTerm(f"gradients of earlier micro-batches, {held}T", held * trained, Moment.COMPUTE))
    return PeerMemory("DDP with autocast" if autocast else "DDP", tuple(terms))


def plain(
    model: PeerModel, *, weights: int = HALF, has_masters: bool = True, held: int = SINGLE, step: StepForm = FUSED
) -> PeerMemory:
    """PyTorch in one process (orchestrator/wings/engines/plain.py). has_masters: the weights are rounded to 16 bits,
    whatever they are held in, and each one's gradient is added to its master's as soon as it is there. held: bytes of
    an element of what is updated; without masters the weights."""
    terms = [
        PeerTerm(f"parameters, {weights}P", weights * model.numel, state=PARAMS),
        *weights_terms(model, HALF if has_masters else SINGLE, model.trained_numel, "T"),
        PeerTerm(f"gradients, {held}T", held * model.trained_numel, Moment.GRADIENTS, GRADS),
        *step_terms(model, step, held),
    ]
    if has_masters:
        terms.append(PeerTerm("gradient of one parameter", weights * model.largest, Moment.COMPUTE))
    return PeerMemory("plain PyTorch", tuple(terms))
