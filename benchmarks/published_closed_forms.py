"""Compares closed forms with the tables that print them: two papers, DeepSpeed's estimators, Megatron's goldens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal

from benchmarks.published_cases import GIB, Comparison, LeftOut, table
from benchmarks.published_peers import megatron, model_of_numels
from zero_runtime.plan import Partition, ZeroPlan
from zero_runtime.precision import MixedPrecision
from zero_runtime.predict.memory.paper_formulas import (
    deepspeed_zero2_estimate,
    deepspeed_zero3_estimate,
)
from zero_runtime.predict.memory.peers import PeerModel
from zero_runtime.state_bytes import ADAM_BYTES, BytesPerElement

# 16-bit parameters and gradients, fp32 master weights: K = 12 with Adam (arXiv 1910.02054, section 3.1).
PAPER_PRECISION = MixedPrecision("fp16", reduce="fp16", accumulate="fp16")
V100_BYTES = 32e9
K, TIB, MIB = 1024, 1 << 40, 1 << 20
MEGATRON_VOCABULARY, MEGATRON_MULTIPLE = 50257, 128  # GPT-2's; --make-vocab-size-divisible-by
CUBLAS_HANDLES = 2  # torch has one for the main thread and one for autograd's
CUBLAS_WORKSPACE = 8 * 4096 * 1024  # the tests set CUBLAS_WORKSPACE_CONFIG=:4096:8, which is 8 buffers of 4096 KiB
ENGINE_WORKSPACE = {"a100": 4 * MIB, "newer": 32 * MIB}  # Transformer Engine, get_cublas_workspace_size_bytes
OTHER_MODELS = ("gpt3_15b", "grpo", "modelopt_distill")  # of golden rows
GOLDEN_TOLERANCE = 0.01


def prints_as(value: float, printed: str) -> bool:
    """Whether `printed` is the value rounded, or truncated, to as many decimals. (The ZeRO paper does both.)"""
    step = Decimal(1).scaleb(-len(printed.partition(".")[2]))
    exact = Decimal(repr(value))
    return Decimal(printed) in {exact.quantize(step, rounding) for rounding in (ROUND_HALF_UP, ROUND_DOWN)}


def paper_bytes_per_param(plan: ZeroPlan, world: int) -> float:
    """Bytes of model states per parameter and rank (arXiv 1910.02054, section 5, figure 1)."""
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


def zero_states() -> Iterator[Comparison]:
    """Bytes of model states per GPU, in GB (1e9)."""
    for row in table("zero_states.csv"):
        plan, world = ZeroPlan.from_stage(int(row["zero"])), int(row["world"])
        value = paper_bytes_per_param(plan, world) * int(row["params"]) / 1e9
        case = f"{row['source']}: {int(row['params']) / 1e9:g}B, N = {world}, ZeRO-{row['zero']}"
        printed = row["printed_gb"]
        yield Comparison(case, value, float(printed), prints_as(value, printed))


def zero_largest() -> Iterator[Comparison]:
    """Parameters of the largest model, in 1e9. The paper rounds the row of one GPU and multiplies: within 1 %."""
    for row in table("zero_largest.csv"):
        plan, parallel = ZeroPlan.from_stage(int(row["zero"])), int(row["model_parallel"])
        value = largest_numel(plan, int(row["world"]), V100_BYTES, model_parallel=parallel) / 1e9
        printed = float(row["printed_billions"])
        # "0.5T", "1T" and "2T" of the last column are rounded to one digit.
        within = 0.03 if printed >= 500 else 0.01
        yield Comparison(
            f"table 2: MP {parallel}, ZeRO-{row['zero']}", value, printed, abs(value / printed - 1) <= within
        )


def zero_infinity() -> Iterator[Comparison]:
    """ZeRO-Infinity, figure 2a: TiB and GiB; K is 1024."""
    for row in table("zero_infinity.csv"):
        model = InfinityModel(int(row["layers"]), int(row["hidden_k"]) * K, int(row["heads"]))
        values = {
            "params_t": model.numel / 1e12,
            "states_tib": model.state_bytes / TIB,
            "activations_tib": model.layers * model.activation_working_bytes(32, K) / TIB,
            "checkpoints_tib": model.checkpoint_bytes(32, K) / TIB,
            "state_working_gib": model.state_working_bytes / GIB,
            "activation_working_gib": model.activation_working_bytes(4, K) / GIB,
        }
        for column, value in values.items():
            agrees = prints_as(value, row[column])
            reason = "" if agrees else _infinity_reason(column, row["params_t"])
            yield Comparison(f"{row['params_t']}T, {column}", value, float(row[column]), agrees, reason)


def _infinity_reason(column: str, params: str) -> str:
    if column == "activations_tib":
        return "the printed column is the formula at batch 64, although the text says batch 32"
    if column == "state_working_gib" and params == "0.10":
        return "the printed 1.95 is not 4 hd x 4 hd bytes; the other rows are"
    return "unknown"


def deepspeed_estimates() -> Iterator[Comparison]:
    """GiB, although DeepSpeed prints GB."""
    for row in table("deepspeed_estimates.csv"):
        numel, gpus, nodes = int(row["params"]), int(row["gpus_per_node"]), int(row["nodes"])
        on_host = row["optimizer_on_host"] == "1"
        if row["zero"] == "2":
            value = deepspeed_zero2_estimate(numel, gpus, nodes, optimizer_on_host=on_host)
        else:
            value = deepspeed_zero3_estimate(
                numel,
                int(row["largest_layer"]),
                gpus,
                nodes,
                params_on_host=row["params_on_host"] == "1",
                optimizer_on_host=on_host,
                built_sharded=row["zero_init"] == "1",
            )
        options = f"offload_param={row['params_on_host']} offload_optimizer={row['optimizer_on_host']} "
        case = f"{row['model']}, ZeRO-{row['zero']}, {gpus} GPU(s), {options}zero_init={row['zero_init'] or '-'}"
        for name, nbytes, printed in (("host", value.host, row["host_gib"]), ("GPU", value.gpu, row["gpu_gib"])):
            agrees = f"{nbytes / GIB:.2f}" == f"{float(printed):.2f}"
            older = f"{(4 * numel + 16 * numel / (gpus * nodes)) / GIB:.2f}" == f"{float(printed):.2f}"
            reason = "" if agrees else "the page prints the estimator before pull request 5099, 4P + 16P/N"
            yield Comparison(
                f"{case}, {name}",
                nbytes / GIB,
                float(printed),
                agrees,
                reason if older or agrees else "unknown",
            )


def megatron_resting() -> Iterator[Comparison | LeftOut]:
    """Bytes that torch has allocated after a step (`mem-allocated-bytes`) on a GPU, of a slice or of all."""
    for row in table("megatron_golden.csv"):
        case = f"{row['case'].partition('/')[2]} ({row['environment']})"
        if reason := _left_out(row):
            yield LeftOut(case, reason)
            continue
        slices = int(row["tensor_parallel"])
        model = gpt_shapes(int(row["layers"]), int(row["hidden"]), int(row["seq"]), slices)
        world = (4 if row["case"].endswith("_1node") else 8) // slices // instances_of(row["case"])
        memory = megatron(model, world, distributed_optimizer=row["distributed_optimizer"] == "1")
        predicted = memory.resting + workspace_bytes(row["environment"])
        published = int(row["resting_bytes"])
        agrees = abs(predicted / published - 1) <= GOLDEN_TOLERANCE
        reason = "" if agrees or "_te_" in case else "layers without Transformer Engine, whose workspaces are not known"
        yield Comparison(case, predicted, published, agrees, reason)


def _left_out(row: dict[str, str]) -> str:
    if row["pipeline_parallel"] != "1" or "_pp2_" in row["case"]:
        return "pipeline parallel: zero-lab has none"
    if row["fsdp"] == "1":
        return "Megatron-FSDP: its rule is not modelled"
    if any(name in row["case"] for name in OTHER_MODELS):
        return "not GPT-2's shapes, or with buffers of inference: the table does not describe them"
    if row["case"].startswith("t5/"):
        return "T5: the table has no number of layers"
    if not row["case"].startswith("gpt/"):
        return "multimodal: the table does not describe the encoder"
    return ""


def instances_of(case: str) -> int:
    """Into how many groups the ranks are divided, each of which shards the optimizer for itself."""
    return 2 if "multi_dist_optimizer_instances" in case else 1


def gpt_shapes(layers: int, hidden: int, seq: int, slices: int = 1) -> PeerModel:
    """Megatron's GPT: learned positions, biases, a tied head, the vocabulary padded to a multiple of 128 for each
    slice. slices: ranks of a tensor-parallel group, which divide all but norms, positions and the biases that are added
    after a sum over the group."""
    multiple = MEGATRON_MULTIPLE * slices
    vocabulary, square = -(-MEGATRON_VOCABULARY // multiple) * multiple, hidden * hidden // slices
    norm = (hidden, hidden)
    attention = (3 * square, 3 * hidden // slices, square, hidden)
    mlp = (4 * square, 4 * hidden // slices, 4 * square, hidden)
    others = (vocabulary * hidden // slices, seq * hidden, *norm)
    return model_of_numels((norm + attention + norm + mlp,) * layers, others)


def workspace_bytes(environment: str) -> int:
    """cuBLAS's and Transformer Engine's workspaces, which torch allocates. `lts` and `dev` without a GPU's name ran on
    A100 (their numbers of Transformer Engine's workspace are those of the A100 rows)."""
    newer = any(name in environment for name in ("h100", "gb200"))
    return CUBLAS_HANDLES * CUBLAS_WORKSPACE + ENGINE_WORKSPACE["newer" if newer else "a100"]
