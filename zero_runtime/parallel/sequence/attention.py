"""The attention of transformers' models around which a sequence-parallel group exchanges, and the models that have it.

[Note: known models]
A layer that mixes tokens outside of its attention (a convolution, a state-space layer, a shift), or an attention that
does not ask transformers' `AttentionInterface`, would compute with a part as if it were the whole, and no error would
show it. So only architectures are accepted of which tests compare the loss with that of one process.
"""

from __future__ import annotations

import itertools
from typing import Any, cast

import torch
from torch import nn

from zero_runtime.errors import PlanError
from zero_runtime.parallel.sequence.axis import SequenceAxis

MODELS = (
    "gemma",
    "gpt2",
    "gpt_neox",
    "granite",
    "llama",
    "mistral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "smollm3",
)
# Frequencies that depend on the largest position in a forward, which differs between the parts of a sequence.
_LENGTH_DEPENDENT = ("dynamic", "longrope")
# What an attention may be given besides queries, keys and values that another rank's tokens would need to know of.
_WHOLE = ("sliding_window", "position_bias", "softcap", "s_aux")
_numbers = itertools.count()


def check_model(model: nn.Module, degree: int) -> None:
    """Raise PlanError for a model whose sequences or heads `degree` ranks cannot divide."""
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if kind not in MODELS:
        found = type(model).__name__ if kind is None else kind
        raise PlanError(
            f"parallel.sp={degree}: expected a model of transformers that is known to mix tokens in its attention "
            f"alone ({', '.join(MODELS)}), found {found}; use one of them, or parallel.sp=1"
        )
    implementation = getattr(config, "_attn_implementation", None)
    if implementation != "sdpa":
        raise PlanError(
            f"parallel.sp={degree}: expected the attention sdpa, found {implementation}; build the model with "
            "attn_implementation='sdpa', or use parallel.sp=1"
        )
    _refuse_windows(config, degree)
    _check_heads(config, degree)


def _refuse_windows(config: Any, degree: int) -> None:
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    other = [kind for kind in kinds or () if kind != "full_attention"]
    if other or (not kinds and window is not None):
        found = other[0] if other else f"sliding_window={window}"
        raise PlanError(
            f"parallel.sp={degree}: expected full causal attention in every layer, found {found}; set "
            "model.config.sliding_window=null, or use parallel.sp=1"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type")
    if kind in _LENGTH_DEPENDENT:
        raise PlanError(
            f"parallel.sp={degree}: expected rotary frequencies that do not depend on the length of a sequence, found "
            f"rope_type={kind}; use another rope_type, or parallel.sp=1"
        )


def divides_heads(degree: int, heads: int, key_value_heads: int) -> bool:
    """Whether ranks can hold equal numbers of heads; of fewer key and value heads each goes to several ranks."""
    return heads % degree == 0 and (key_value_heads % degree == 0 or degree % key_value_heads == 0)


def _check_heads(config: Any, degree: int) -> None:
    heads, grouped = config.num_attention_heads, _key_value_heads(config)
    if divides_heads(degree, heads, grouped):
        return
    fits = [one for one in range(1, heads + 1) if divides_heads(one, heads, grouped)]
    below, above = [one for one in fits if one < degree], [one for one in fits if one > degree]
    also = "" if grouped == heads else f", and one that divides or is divided by the {grouped} key and value heads"
    raise PlanError(
        f"parallel.sp={degree}: expected a divisor of the {heads} attention heads{also}, found {degree}; use "
        f"{' or '.join(f'parallel.sp={one}' for one in (*below[-1:], *above[:1]))}"
    )


def traded_widths(model: nn.Module, degree: int) -> tuple[tuple[int, int], ...]:
    """By block, the elements of a token in its two exchanges: queries, keys and values; the attention's result."""
    config = cast(Any, model).config
    heads, grouped = config.num_attention_heads, _key_value_heads(config)
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    traded = grouped if grouped % degree == 0 else degree  # each copied to several ranks
    return (((heads + 2 * traded) * size, heads * size),) * int(config.num_hidden_layers)


def _key_value_heads(config: Any) -> int:
    return getattr(config, "num_key_value_heads", None) or int(config.num_attention_heads)


class InstalledAttention:
    """An attention function of transformers of this model alone, that exchanges parts of sequences for heads.

    Its name is in no table of masks, so transformers makes none: the attention is causal.
    """

    def __init__(self, model: nn.Module, axis: SequenceAxis) -> None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        self._config = cast(Any, model).config
        self._axis = axis
        self._own = ALL_ATTENTION_FUNCTIONS["sdpa"]
        self._functions: Any = ALL_ATTENTION_FUNCTIONS
        self._name = f"zero_runtime_sequence_parallel_{next(_numbers)}"
        self._functions[self._name] = self._attend
        self._config._attn_implementation = self._name

    def _attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """Queries, keys and values [B, H, t, D] of this rank's tokens to the attention's result [B, t, H, D]."""
        known = [name for name in _WHOLE if others.get(name) is not None]
        if attention_mask is not None or known:
            raise PlanError(
                f"parallel.sp={self._axis.degree}: expected a causal attention without a mask, found "
                f"{known[0] if known else 'attention_mask'} in {type(module).__name__}; use parallel.sp=1"
            )
        for name in ("position_ids", *_WHOLE):  # of this rank's part; the attention is over all tokens
            others.pop(name, None)
        result, _ = self._own(module, *self._axis.heads(query, key, value), None, **others)
        return self._axis.tokens(result), None

    def remove(self) -> None:
        """Restore the model's own attention. Idempotent."""
        if self._functions.pop(self._name, None) is not None:
            self._config._attn_implementation = "sdpa"
