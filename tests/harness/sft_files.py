"""The files of examples/make_sft_files.py: a tiny model folder of Qwen2's architecture, and 64 pairs."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "make_sft_files.py"


def make_sft_files(folder: Path) -> tuple[Path, Path]:
    """Writes them. Returns the model folder and the file of pairs."""
    runpy.run_path(str(SCRIPT))["main"](folder)
    return folder / "model", folder / "train.json"


def loss_by_hand(model_folder: Path, file: Path, indices: list[int]) -> tuple[float, list[int]]:
    """The mean loss over the tokens of some pairs' responses, and how many each has, by plain transformers: each pair
    alone, without filling, its text written out here."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    pairs, total, counts = json.loads(file.read_text()), 0.0, []
    for index in indices:
        prompt = f"<|im_start|>user\n{pairs[index]['prompt']}<|im_end|>\n<|im_start|>assistant\n"
        response = f"{pairs[index]['response']}<|im_end|>\n"
        before, after = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, response))
        with torch.no_grad():
            logits = model(torch.tensor([[*before, *after]])).logits[0].double()
        for place, token in enumerate(after, start=len(before)):
            total -= float(torch.log_softmax(logits[place - 1], -1)[token])
        counts.append(len(after))
    return total / sum(counts), counts
