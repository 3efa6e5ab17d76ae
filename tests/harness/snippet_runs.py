"""Runs the snippets of tests/foreign/snippets on this rank: configurations by the Trainer, scripts as they are."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from harness.generation import small_model
from harness.trainer_runs import TrainerCase, as_launched, make_trainer

FOLDER = Path(__file__).resolve().parents[1] / "foreign" / "snippets"
BYTES = 384  # the vocabulary of ByT5's tokenizer, which needs no files: bytes and special tokens


@dataclass(frozen=True)
class Job:
    """One snippet: the name of its file, and the words or the TrainingArguments that it gets.

    {models} in a word is the folder with the saved models `t5` (with a tokenizer) and `gpt2`, {snippets} that of the
    snippets. without: a package that the snippet does not find.
    """

    name: str
    words: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    without: str = ""


@dataclass(frozen=True)
class SnippetResult:
    """What a snippet did on one rank. printed: its lines on stdout. refused: the error that ended it. meaning: what the
    engine answers about a configuration after two steps."""

    printed: tuple[str, ...] = ()
    refused: str = ""
    meaning: dict[str, Any] = field(default_factory=dict)


def run_all(folder: str, jobs: dict[str, Job]) -> dict[str, SnippetResult]:
    """Run the jobs one after the other on this rank of an initialized world, each in a folder of its own."""
    from zero_runtime.deepspeed import live_engines

    as_launched()
    if dist.get_rank() == 0:
        save_models(Path(folder, "models"))
    found = {}
    for name, job in jobs.items():
        work = Path(folder, name)
        work.mkdir(exist_ok=True)
        os.chdir(work)
        dist.barrier()
        found[name] = run_job(job, Path(folder, "models"))
        for engine in list(live_engines._LIVE):  # what an error or a script left
            engine.destroy()
    dist.barrier()
    return found


def run_job(job: Job, models: Path) -> SnippetResult:
    """Run one snippet in the current folder; an error of it is its result."""
    printed, before = io.StringIO(), sys.argv
    sys.argv = [job.name, *(word.format(models=models, snippets=FOLDER) for word in job.words.split())]
    meaning: dict[str, Any] = {}
    refused = ""
    if job.without:
        sys.modules[job.without] = None  # type: ignore[assignment]  # importing it raises ImportError
    with warnings.catch_warnings(), contextlib.redirect_stdout(printed):
        warnings.simplefilter("ignore")
        try:
            if job.name.endswith(".py"):
                runpy.run_path(str(FOLDER / job.name), run_name="__main__")
            else:
                meaning = _trained(job)
        except Exception as error:
            refused = f"{type(error).__name__}: {error}"
        finally:
            sys.argv = before
            sys.modules.pop(job.without, None)
    return SnippetResult(tuple(printed.getvalue().splitlines()), refused, meaning)


def _trained(job: Job) -> dict[str, Any]:
    """Train two steps with a configuration, by the Trainer; /local_nvme is the current folder."""
    if dist.get_rank() == 0:
        text = (FOLDER / job.name).read_text(encoding="utf-8").replace("/local_nvme", os.getcwd())
        Path(job.name).write_text(text, encoding="utf-8")
    dist.barrier()
    fixed = {"max_steps": 2, "eval_strategy": "no", "save_strategy": "no", "deepspeed": job.name}
    trainer = make_trainer(TrainerCase(None, arguments=fixed | job.arguments), "out")
    trainer.train()
    trainer.save_model("saved")
    dist.barrier()
    engine, config = trainer.engine, trainer.engine.config
    return {
        "steps": engine.global_steps,
        "stage": engine.zero_optimization_stage(),
        "batch": engine.get_batch_info(),
        "clipping": engine.gradient_clipping(),
        "computes": config.precision.param,
        "reduces": config.precision.reduce,
        "scale": None if config.precision.param != "fp16" else engine.loss_scale(),
        "optimizer": type(engine.runtime.optimizer.config).__name__,
        "rate": engine.optimizer.param_groups[0]["lr"],
        "schedule": str(getattr(trainer.lr_scheduler, "_schedules", ["the Trainer's"])[0]),
        "offloads": (config.offload.optimizer.value, config.offload.params.value),
        "idle": sorted(config.idle),
        "saved": sorted(path.name for path in Path("saved").iterdir() if path.suffix == ".safetensors"),
    }


def save_models(folder: Path) -> None:
    """A small T5 for the tokens of ByT5, whose tokenizer needs no files, and a small GPT-2, both with random values."""
    import torch
    from transformers import ByT5Tokenizer, T5Config, T5ForConditionalGeneration

    small_model("gpt2").save_pretrained(folder / "gpt2")
    torch.manual_seed(0)
    sizes = {"vocab_size": BYTES, "d_model": 16, "d_kv": 8, "d_ff": 36, "num_layers": 2, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))
    for param in model.parameters():
        param.data.mul_(3)  # initial values are so small that every answer would repeat the first token
    model.save_pretrained(folder / "t5")
    ByT5Tokenizer().save_pretrained(folder / "t5")


def shown(results: list[dict[str, SnippetResult]], name: str) -> str:
    """The results of all ranks for an assertion's message."""
    return json.dumps([results[rank][name].__dict__ for rank in range(len(results))], indent=1, default=str)
