"""`zlab export-weights CKPT OUT`: the weights of a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from orchestrator.units import count, size

DTYPES = ("bf16", "fp32")
USAGE = "zlab export-weights CHECKPOINT OUT [--dtype bf16|fp32]"
BAD_USAGE, FAILED = 2, 1


def main(words: Sequence[str]) -> int:
    """0: OUT is there and whole. 1: it could not be written. 2: the words were wrong, nothing was written."""
    asked = _asked(list(words))
    if isinstance(asked, str):
        print(f"error: {asked}\nusage: {USAGE}", file=sys.stderr)
        return BAD_USAGE
    checkpoint, out, dtype = asked
    print(f"reading {checkpoint}", flush=True)
    from zero_runtime.errors import CheckpointError

    try:
        _export(checkpoint, out, dtype)
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    return 0


def _asked(words: list[str]) -> tuple[Path, Path, str] | str:
    """Checkpoint, folder and dtype; or what is wrong with the words."""
    dtype = "bf16"
    if "--dtype" in words:
        place = words.index("--dtype")
        dtype = words[place + 1] if place + 1 < len(words) else ""
        del words[place : place + 2]
    if dtype not in DTYPES:
        return f"--dtype: expected one of {', '.join(DTYPES)}, found '{dtype}'"
    if len(words) != 2:
        return f"expected the folder of a checkpoint and a folder to make, found {len(words)} words"
    return Path(words[0]), Path(words[1]), dtype


def _export(path: Path, out: Path, dtype: str) -> None:
    from orchestrator.workloads.models import saved_config  # here: it imports torch and transformers
    from zero_runtime.checkpoint.hf_folder import write_weights
    from zero_runtime.checkpoint.load import Checkpoint
    from zero_runtime.dtypes import TORCH_DTYPE

    with Checkpoint.open(path) as checkpoint:
        written = write_weights(checkpoint.state("master"), out, dtype=TORCH_DTYPE[dtype])
        model = checkpoint.index.trainer["config"]["model"]
        parameters = sum(entry.numel for entry in checkpoint.index.parameters.values())
    saved_config(model["model_type"], model["config"], TORCH_DTYPE[dtype]).save_pretrained(out)
    told = f"{count(parameters)} parameters in {dtype}, {size(written.bytes)}, {len(written.files)} file(s)"
    print(f"written: {out}: {told}")
    print(f"next     python -c \"from transformers import AutoModelForCausalLM as M; M.from_pretrained('{out}')\"")
