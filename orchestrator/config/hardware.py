"""The hardware that a plan is made for: this machine, or the GPUs of a node that is described by its data sheet."""

from __future__ import annotations

from dataclasses import dataclass, fields

from orchestrator.config.strict import Limits

AUTO = "auto"
PRICE = ("price_per_hour", "currency")  # keys that this machine may have too


@dataclass(frozen=True)
class GpuNode:
    """The GPUs of a node and their links. auto is this machine; with any other option `--plan` needs no GPU here.

    `name`: the name in tables. `gpu`: the GPU's name as the driver reports it (`nvidia-smi -L`). `gpus`: the number of
    GPUs of a node.

    `memory_mib`: the memory of one GPU that CUDA can allocate, as `torch.cuda.get_device_properties(0).total_memory`
    reports it; `memory.total` of nvidia-smi also counts what the driver keeps for itself.

    `fp32_tflops`, `tf32_tflops`, `fp16_tflops`, `bf16_tflops`, `fp8_tflops`: the dense peak of matrix products, 10^12
    operations per second, never with sparsity, and with sums in fp32 where a data sheet distinguishes them; that of
    fp32 is without TF32. null: the GPU has no matrix instructions for the dtype, or, for fp32 alone, the peak is not
    known.

    Numbers that are null are not known. `memory_gb_per_s`: bandwidth of a GPU's memory, in 10^9 bytes per second.
    `link_gb_per_s`: between GPUs of a node, for one GPU and one direction, in 10^9 bytes per second.
    `network_gb_per_s`: as link_gb_per_s, between nodes. `host_link_gb_per_s`: as link_gb_per_s, to host memory.
    `host_memory_gib`: host memory of a node. `host_memory_gb_per_s`: its bandwidth, of all processors of the node
    together. `drive_gb_per_s`: of the node's drives for scratch files together, in the slower direction.

    `price_per_hour`: what one GPU costs in an hour, or one machine if the ranks compute on CPUs. It may be set for this
    machine too, as `currency`, the text that is written after amounts, such as EUR.
    """

    name: str = AUTO
    gpu: str | None = None
    gpus: int | None = None
    memory_mib: int | None = None
    fp32_tflops: float | None = None
    tf32_tflops: float | None = None
    fp16_tflops: float | None = None
    bf16_tflops: float | None = None
    fp8_tflops: float | None = None
    memory_gb_per_s: float | None = None
    link_gb_per_s: float | None = None
    network_gb_per_s: float | None = None
    host_link_gb_per_s: float | None = None
    host_memory_gib: float | None = None
    host_memory_gb_per_s: float | None = None
    drive_gb_per_s: float | None = None
    price_per_hour: float | None = None
    currency: str | None = None

    def __post_init__(self) -> None:
        limits = Limits(vars(self), "hardware")
        limits.must("name", bool, "the name of the hardware, or auto", AUTO)
        limits.must("gpu", bool, "the name of a GPU, or null", None)
        limits.at_least(1, gpus=8, memory_mib=None)
        for key in (one.name for one in fields(self) if one.name.endswith(("_tflops", "_per_s", "_gib"))):
            limits.must(key, lambda value: value > 0, "above 0, or null", None)
        limits.must("price_per_hour", lambda value: value >= 0, "at least 0, or null", None)
        limits.must("currency", lambda value: bool(value) and value.isprintable(), "a word such as EUR, or null", None)
        if self.name and not self.is_described:
            for key in (one.name for one in fields(self) if one.name not in ("name", *PRICE)):
                if (value := getattr(self, key)) is not None:
                    limits.refuse(
                        f"hardware.name=auto is this machine and has no hardware.{key}", value, f"hardware.{key}=null"
                    )
        elif self.gpus is None:
            limits.refuse(f"hardware={self.name} needs hardware.gpus", None, "hardware.gpus=8")
        limits.conclude()

    @property
    def is_described(self) -> bool:
        """Whether the hardware is described here, not detected on this machine."""
        return self.name != AUTO

    @property
    def memory_bytes(self) -> int | None:
        """The memory in bytes that CUDA can allocate on one GPU; None if it is not known."""
        return None if self.memory_mib is None else self.memory_mib << 20

    @property
    def host_bytes(self) -> int | None:
        """The host memory of a node in bytes; None if it is not known."""
        return None if self.host_memory_gib is None else int(self.host_memory_gib * (1 << 30))

    def tflops(self, dtype: str) -> float | None:
        """The dense peak for fp32, tf32, fp16, bf16 or fp8, in 10^12 operations per second; None as for the keys."""
        peak: float | None = getattr(self, f"{dtype}_tflops")
        return peak

    def lacks(self, dtype: str) -> bool:
        """Whether the GPU is known to have no matrix instructions for tf32, fp16, bf16 or fp8.

        A description without any peak says nothing about dtypes.
        """
        return dtype != "fp32" and self.tflops(dtype) is None and self.fp16_tflops is not None
