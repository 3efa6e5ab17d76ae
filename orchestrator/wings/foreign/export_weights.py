"""`zlab export-weights CKPT OUT`: exports weights of a checkpoint as a Hugging Face folder, adapters for PEFT."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.commands.verb_parser import VerbParser, add_json, verb_parser
from orchestrator.config.strict import Refusal
from orchestrator.exit_codes import FAILED
from orchestrator.records.run_record import AttemptPaths
from orchestrator.report import trained
from orchestrator.text.paths import python
from orchestrator.text.streams import complain
from orchestrator.text.units import count, many, size
from orchestrator.wings.pretrained.companions import write_companions

if TYPE_CHECKING:
    from zero_runtime.checkpoint.load import CheckpointReader
    from zero_runtime.tensor_source import TensorSource

DTYPES = ("bf16", "fp32")
DEFAULT_DTYPE = "bf16"  # without --merge, which keeps that of the base


def main(words: Sequence[str]) -> int:
    """0: OUT is complete. 1: it could not be written. Refusal: the arguments were wrong, nothing was written."""
    asked = parser().parse_args(words)
    from zero_runtime.errors import CheckpointError

    try:
        _export(asked.checkpoint, asked.out, asked.dtype, merges=asked.merge)
    except (CheckpointError, ImportError) as error:
        complain(f"error: {error}")
        return FAILED
    return 0


def parser() -> VerbParser:
    parser = verb_parser("export-weights", "The weights of a checkpoint as a Hugging Face folder, adapters for PEFT.")
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", type=Path, help="a folder: of one, or with several as a point's: the newest"
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="a folder to make")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bf16; with --merge that of the base's weights")
    parser.add_argument(
        "--merge", action="store_true", help="of a run with adapter=lora: a whole model, its adapters added to the base"
    )
    add_json(parser, "the output of export-weights is the folder OUT")
    return parser


def _export(path: Path, out: Path, asked: str | None, *, merges: bool) -> None:
    from zero_runtime.checkpoint.load import CheckpointReader  # imported here: it imports torch

    path = _newest_in(path)
    print(f"reading {path}", flush=True)
    with CheckpointReader.open(path) as checkpoint:
        config, dtype = checkpoint.index.trainer.get("config"), asked or DEFAULT_DTYPE
        adapted = config is not None and config.get("adapter", {}).get("kind") == "lora"
        if merges and not adapted:
            raise Refusal(["--merge: expected a checkpoint with adapters, found one without      fix: remove --merge"])
        if config is None:
            _export_of_engine(checkpoint, out, dtype)
        elif merges:
            _export_merged(checkpoint, out, asked, config)
        elif adapted:
            _export_adapter(checkpoint, out, dtype, config)
        else:
            _export_model(checkpoint, out, dtype, config)


def _newest_in(path: Path) -> Path:
    """The newest checkpoint in a root of several, such as the folder of an engine's tag; else the path itself."""
    from zero_runtime.checkpoint.retention import committed
    from zero_runtime.errors import CheckpointError, some

    own = AttemptPaths(path / "attempts" / "01").checkpoints  # of a point's folder
    path = own if own.is_dir() else path
    steps = committed(path)
    tags = [one.name for one in path.iterdir() if one.is_dir() and committed(one)] if path.is_dir() else []
    if tags and not steps:
        raise CheckpointError(f"{path}: expected one checkpoint, found folders of tags: {some(sorted(tags))}; take one")
    return list(steps.values())[-1] if steps else path


def _export_model(checkpoint: CheckpointReader, out: Path, dtype: str, config: dict[str, Any]) -> None:
    weights = _write(checkpoint.state("master"), out, dtype)
    print(f"{weights}; {write_companions(out, config, dtype)}")
    _propose("AutoModelForCausalLM", out)


def _export_of_engine(checkpoint: CheckpointReader, out: Path, dtype: str) -> None:
    """A checkpoint of `engine.save_checkpoint`; it holds the model's configuration if the model had one."""
    from zero_runtime.dtypes import TORCH_DTYPE

    weights = _write(checkpoint.state("master"), out, dtype)
    config = checkpoint.index.trainer.get("model_config")
    if config is None:
        print(f"{weights}; no config.json: the engine's model had none")
        return
    config = {**config, "dtype": str(TORCH_DTYPE[dtype]).removeprefix("torch.")}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    print(f"{weights}; config.json; no tokenizer: an engine's checkpoint has none")
    _propose(config["architectures"][0], out)


def _export_adapter(checkpoint: CheckpointReader, out: Path, dtype: str, config: dict[str, Any]) -> None:
    from orchestrator.wings.pretrained import adapters

    weights = _write(adapters.adapter_weights(checkpoint.state("master")), out, dtype, stem=adapters.ADAPTER)
    settings, base = config["adapter"], config["model"]["path"]
    adapters.save_adapter_config(
        adapters.lora_config(settings["rank"], settings["alpha"], settings["targets"], base), out
    )
    print(f"{weights}; only the adapters")
    print(f"next     {trained.generating(str(out), config)}")
    print(f"Python   peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained('{base}'), '{out}')")


def _export_merged(checkpoint: CheckpointReader, out: Path, asked: str | None, config: dict[str, Any]) -> None:
    """The base and its adapters as one model, rounded once, to the dtype of the base's weights unless one is asked."""
    from orchestrator.wings.pretrained import merging

    with merging.merged(checkpoint.state("master"), config) as source:
        dtype = asked or merging.dtype_of(source.base)
        weights = _write(source.weights, out, dtype)
        if source.weights.untied:  # an adapter of a tied weight under one of its names: two weights from now on
            config["model"]["config"]["tie_word_embeddings"] = False
        code = config.get("precision", {}).get("weights")
        into = f" into the {code} weights as they are read back" if code else ""
        print(f"{weights}; adapters merged{into}; {write_companions(out, config, dtype)}")
    _propose("AutoModelForCausalLM", out)
    print(f"         {trained.generating(str(out), config)}")


def _write(source: TensorSource, out: Path, dtype: str, stem: str = "model") -> str:
    """Writes the weights and describes them."""
    from zero_runtime.checkpoint.hugging_face.folder import write_weights
    from zero_runtime.dtypes import TORCH_DTYPE

    written = write_weights(source, out, dtype=TORCH_DTYPE[dtype], stem=stem)
    parameters = count(sum(math.prod(source.shape(name)) for name in source.names()))
    return (
        f"written: {out}: {parameters} parameters in {dtype}, {size(written.bytes)}, {many(len(written.files), 'file')}"
    )


def _propose(name: str, out: Path) -> None:
    print(f"next     {python()} -c \"from transformers import {name} as M; M.from_pretrained('{out}')\"")
