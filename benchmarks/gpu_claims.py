"""What `make gpu` tries, in the order of what is learnt first: each claim with what is expected, and its command.

A command confirms its claim with exit code 0. UNREACHED means that it could not try, for example because a package is
missing; any other code, and the end of its time limit, refute the claim.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

UNREACHED = (2, 4, 5)  # no device; pytest: wrong usage, no test selected
LARGE = ["--layers", "24", "--width", "1024", "--heads", "16", "--vocab", "50304", "--seq", "1024", "--micro", "8"]
MEASURED = "it ends and writes its figures, with which nothing can be compared yet"
FITS = "rows that fit calls fitting run to their end on one GPU, with peaks within 3 % of the predicted ones"
ENGINES = "on {} no engine's row of sweeps=engines fails; their work is counted and their losses are compared"


@dataclass(frozen=True)
class Claim:
    """One claim. `expected`: one line, with a figure if there is one. `gpus`: the fewest with which it can be tried.

    `variables`: environment variables of the command in addition to those of the runner. `timed`: its figures are
    times, so that nothing else may run beside it.
    """

    name: str
    expected: str
    command: tuple[str, ...]
    limit_s: float = 300.0
    gpus: int = 1
    variables: Mapping[str, str] = field(default_factory=dict, hash=False)
    timed: bool = False


def tests(file: str, *chosen: str) -> tuple[str, ...]:
    """The command of the tests of one file; `chosen`: those of these names alone."""
    paths = [f"tests/gpu/{file}::{name}" for name in chosen] or [f"tests/gpu/{file}"]
    return (sys.executable, "-m", "pytest", "-m", "gpu", "-x", "-s", "-p", "no:cacheprovider", *paths)


def script(name: str, *words: str) -> tuple[str, ...]:
    """The command of another benchmark."""
    return (sys.executable, f"benchmarks/{name}", *words)


RANKS = "test_cuda_ranks.py"
CLAIMS = (
    Claim("device", "torch multiplies matrices on every GPU, and each differs from the others", script("gpu_facts.py")),
    Claim(
        "triton", "every Triton kernel compiles and has the reference's results", tests("test_cuda_kernels.py"), 600.0
    ),
    Claim(
        "one-rank",
        "0 of 14 rows differ by a bit from plain torch in fp64 on one GPU, in exact arithmetic",
        tests("test_cuda_rows.py", "test_every_row_has_the_bits_of_plain_torch_in_fp64"),
    ),
    Claim(
        "nccl",
        "0 of 14 rows differ by a bit from plain torch in fp64 over NCCL on all GPUs, in exact arithmetic",
        tests(RANKS, "test_every_row_over_nccl_has_the_bits_of_plain_torch_in_fp64"),
        600.0,
        2,
    ),
    Claim(
        "close",
        "8 runtimes in one process, each closed twice, end within 4 minutes on all GPUs",
        tests(RANKS, "test_runtimes_end_twice_and_are_followed_by_others_in_one_process"),
        300.0,
        2,
    ),
    Claim(
        "oom",
        "a rank out of memory is named by every other rank, and all processes end within 3 minutes",
        tests(RANKS, "test_a_rank_out_of_memory_is_named_by_all_and_every_process_ends"),
        240.0,
        2,
    ),
    Claim(
        "hybrid",
        "0 of 6 rows with two replicas of each shard differ by a bit from plain torch in fp64 over NCCL",
        tests(RANKS, "test_hybrid_sharding_over_nccl_has_the_bits_of_plain_torch_in_fp64"),
        600.0,
        4,
    ),
    Claim(
        "one-wait",
        "the host waits for the GPU 1 time in a step, in every stage",
        tests("test_cuda_rows.py", "test_a_step_waits_for_the_gpu_once"),
    ),
    Claim(
        "rows",
        "all stages have the same losses on one GPU, in fp32 and bf16",
        tests("test_cuda_rows.py", "test_all_rows_have_the_same_losses_which_fall"),
    ),
    Claim(
        "races",
        "torch's sanitizer of streams finds 0 races in the rows on one GPU",
        tests("test_cuda_rows.py", "test_every_row_has_the_bits_of_plain_torch_in_fp64"),
        600.0,
        variables={"TORCH_CUDA_SANITIZER": "1"},
    ),
    Claim(
        "activations",
        "kept bytes of activations are those predicted",
        tests("test_cuda_activations.py"),
    ),
    Claim(
        "kept",
        "with activations on the host less stays on the GPU, also while the host is ahead of it",
        tests("test_cuda_kept_activations.py"),
    ),
    Claim(
        "allocator",
        "the model of the caching allocator reserves what torch reserves, after each of 12,000 events",
        tests("test_cuda_allocator.py"),
        600.0,
    ),
    Claim(
        "overhead",
        "CUDA and NCCL take what predictions allow: 0.39 to 0.59 GiB, and 0.49 to 0.68 GiB for each communicator",
        tests(RANKS, "test_cuda_and_nccl_take_what_the_allowance_of_predictions_says"),
        gpus=2,
    ),
    Claim(
        "offload", "all rows with states on the host or in a file have one result", tests("test_cuda_offload.py"), 900.0
    ),
    Claim(
        "kernels",
        "each Triton update has at least 80 % of the speed of a copy of as many bytes, with 8-bit moments 40 %",
        script("kernels_gpu.py", "--least-percent", "80", "--least-percent-8bit", "40"),
        600.0,
        timed=True,
    ),
    Claim(
        "speed",
        "the predicted steps of stages 0, 1 and 3 are within 25 % of the measured ones",
        script("gpu_speed.py", "--most-percent", "25"),
        600.0,
        timed=True,
    ),
    Claim("stages-bf16", MEASURED, script("stages.py", "--precision", "bf16", *LARGE), 1200.0, timed=True),
    Claim("stages-fp32", MEASURED, script("stages.py", "--precision", "fp32", *LARGE), 1200.0, timed=True),
    Claim("engines-one", ENGINES.format("one GPU"), script("gpu_engines.py", "--ranks", "1"), 1200.0, timed=True),
    Claim("engines", ENGINES.format("all GPUs"), script("gpu_engines.py"), 1200.0, 2, timed=True),
    Claim("fits", FITS, script("gpu_fits.py"), 900.0, timed=True),  # it fills the GPU
    Claim("host-offload", MEASURED, script("host_offload.py"), 1200.0, timed=True),
)
