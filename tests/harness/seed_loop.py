"""What the training loop of tests/foreign/snippets/loop.py needs: a tokenizer and a model without a hub, and texts."""

from __future__ import annotations

import os
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

SNIPPETS = Path(__file__).resolve().parents[1] / "foreign" / "snippets"
TEXTS = ("to be or not to be", "that is the question", "whether tis nobler", "in the mind to suffer")


class Words:
    """A tokenizer: letters of a text as ids, 0 for padding."""

    def __call__(self, texts: list[str], *, return_tensors: str, padding: bool) -> Any:
        import torch
        from transformers import BatchEncoding

        assert return_tensors == "pt"
        assert padding
        ids = [torch.tensor([ord(letter) - 31 for letter in text]) for text in texts]
        padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
        return BatchEncoding({"input_ids": padded, "attention_mask": (padded > 0).long()})


def tiny_llama(*, torch_dtype: Any) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 64}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **layers)).to(torch_dtype)


def initialize_quietly(**given: Any) -> tuple[Any, Any, Any, Any]:
    """initialize without its warning, which other tests check."""
    import zero_runtime

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return zero_runtime.initialize(**given)


def run_script(folder: str, config: str, steps: int) -> dict[str, Any]:
    """Run the loop in `folder` with one of the configurations beside it for `steps` batches. Returns what it printed
    and counted, or the message with which it was refused."""
    from zero_runtime.errors import PlanError

    os.chdir(folder)
    told: list[str] = []
    sys.argv = ["loop.py", str(SNIPPETS / config), str(steps)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            names = runpy.run_path(str(SNIPPETS / "loop.py"), {"print": told.append}, "__main__")
        except PlanError as error:
            return {"refused": str(error), "told": told}
    engine = names["engine"]
    found = {
        "told": told,
        "steps": (engine.global_steps, engine.skipped_steps, engine.runtime.updates),
        "dtype": {str(param.dtype) for param in engine.parameters()},
        "warned": [str(warning.message) for warning in caught if "zero_runtime" in str(warning.message)],
        "returned": (names["optimizer"] is engine.optimizer, names["scheduler"], names["loader"]),
        "numbers": (engine.device.type, engine.global_rank, engine.local_rank, engine.world_size),
    }
    engine.destroy()
    return found


def unequal(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """The names of the tensors that differ."""
    assert found.keys() == expected.keys()
    return [name for name in found if not found[name].equal(expected[name])]


def full_values(engine: Any) -> dict[str, Any]:
    """A copy of each full weight. Every rank must call it."""
    with engine.runtime.full_params() as values:
        return {name: value.clone() for name, value in values.items()}
