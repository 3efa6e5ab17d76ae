"""Loads tokenizers from local folders, and saves one for data that is read as bytes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when the libraries are imported: nothing is downloaded

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

Encode = Callable[[list[str]], list[list[int]]]
BYTES = 256


def load_tokenizer(folder: str | Path) -> Encode:
    """The tokenizer of a local folder as a function from texts to token ids, without begin or end tokens.

    ValueError for a tokenizer that is Python code in that folder: code from a model's folder is never run.
    """
    tokenizer = _loaded(folder)

    def encode(texts: list[str]) -> list[list[int]]:
        ids: list[list[int]] = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    return encode


def _loaded(folder: str | Path) -> Any:
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        # The error of transformers suggests an argument that cannot be given here.
        raise ValueError(
            f"{folder}: expected a tokenizer of transformers' own, found one that is code of its folder (auto_map in "
            "tokenizer_config.json), which is not run; use data.tokenizer=bytes, or save it as a fast tokenizer"
        ) from None


class Texts(NamedTuple):
    """Texts to token ids and back, for prompts: with the begin tokens that the model was trained with."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]


def texts_of(folder: str | Path | None, vocab_size: int) -> Texts:
    """The tokenizer of a model's folder, or the project's own (one token for each byte) if there is none.

    ValueError if there is none and the vocabulary has fewer tokens than a byte has values.
    """
    if folder is not None and (Path(folder) / "tokenizer_config.json").exists():
        tokenizer = _loaded(folder)
        return Texts(lambda text: list(tokenizer(text)["input_ids"]), tokenizer.decode)
    if vocab_size < BYTES:
        raise ValueError(
            f"prompt: expected a model with a tokenizer in its folder, or with a vocabulary of {BYTES} bytes, found no "
            f"tokenizer and {vocab_size} tokens; give token ids: tokens=5,6,7"
        )
    return Texts(
        lambda text: list(text.encode()), lambda ids: bytes(one for one in ids if one < BYTES).decode(errors="replace")
    )


def save_byte_tokenizer(folder: str | Path) -> None:
    """Saves a tokenizer for byte tokens: token b is byte b, so encoding and decoding returns the same text."""
    letters = bytes_to_unicode()
    bare = Tokenizer(BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
    bare.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    bare.decoder = ByteLevelDecoder()
    PreTrainedTokenizerFast(tokenizer_object=bare, clean_up_tokenization_spaces=False).save_pretrained(folder)
