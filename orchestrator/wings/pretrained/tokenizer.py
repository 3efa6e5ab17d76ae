"""Loads tokenizers from local folders, and saves one for data that is read as bytes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when the libraries are imported: nothing is downloaded

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from orchestrator.wings.pairs.conversation import CALLS, TOOLS, Message, Pair
from orchestrator.wings.pairs.windows import BYTE_END, Encoded, EncodePairs, joined, plain_parts

Encode = Callable[[list[str]], list[list[int]]]
BYTES = 256
REASON_LENGTH = 200


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
    except Exception as error:  # the tokenizers library raises no narrower one
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if "trust_remote_code" in reason:  # transformers suggests an argument that cannot be given here
        raise ValueError(
            f"{folder}: expected a tokenizer of transformers' own, found one that is code of its folder (auto_map in "
            "tokenizer_config.json), which is not run; use data.tokenizer=bytes, or save it as a fast tokenizer"
        )
    raise ValueError(
        f"{folder}: expected the files of a tokenizer, such as tokenizer.json, found some that cannot be read "
        f"({reason[:REASON_LENGTH]}); save or download them again, or use data.tokenizer=bytes"
    )


class Texts(NamedTuple):
    """Texts to token ids and back, for prompts: with the begin tokens that the model was trained with.

    `ask`: a text as the prompt of data=pairs. `end`: the token that ends a response to it; None if there is none.
    """

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    ask: Callable[[str], list[int]]
    end: int | None


def pair_encoder(folder: str | Path) -> EncodePairs:
    """The tokens of pairs by the tokenizer of a local folder: as its chat template writes them, or without one the
    prompt, the response and the tokenizer's end token. ValueError for a template that cannot be divided."""
    encoder = _PairEncoder(_loaded(folder))
    return EncodePairs(encoder.encode, encoder.has_template)


class _PairEncoder:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.has_template = bool(getattr(tokenizer, "chat_template", None))

    def encode(self, pairs: Sequence[Pair]) -> list[Encoded]:
        if not pairs:
            return []
        parts = [self._templated(pair) if self.has_template else list(plain_parts(pair)) for pair in pairs]
        texts = [text for one in parts for part in one for text in part]
        ids = iter(self._ids(texts))
        found = [[(next(ids), next(ids)) for _ in one] for one in parts]
        unread = [self._unwritten(pair) if self.has_template else pair.extra_keys() for pair in pairs]
        if not self.has_template:
            end = [] if self.end is None else [self.end]
            for pair, one in zip(pairs, found, strict=True):
                one[:] = [(context, [*answer, *end]) for context, answer in one]
                one[0] = (self.prompt(pair.turns[: next(pair.answers())]), one[0][1])  # with what begins a text
        return list(map(joined, pairs, found, unread))

    def prompt(self, turns: Sequence[Message]) -> list[int]:
        """The tokens of a prompt alone."""
        if self.has_template:
            return self._ids([self._rendered(Pair(tuple(turns)), opens_answer=True)])[0]
        ids: list[int] = self._tokenizer("\n".join(turn["content"] for turn in turns), verbose=False)["input_ids"]
        return ids[:-1] if ids and ids[-1] == self._tokenizer.eos_token_id else ids

    @property
    def end(self) -> int | None:
        """The token that ends a response: the first special one that the template writes after it, or else the
        tokenizer's end token."""
        if self.has_template:
            ((_, response),) = self._templated(
                Pair(({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}))
            )
            special = set(self._tokenizer.all_special_ids)
            found = next((token for token in self._ids([response])[0] if token in special), None)
            if found is not None:
                return found
        end: int | None = self._tokenizer.eos_token_id
        return end

    def _templated(self, pair: Pair) -> list[tuple[str, str]]:
        """The texts of each answer and of what comes before it. They are tokenized apart, so that the prompt's tokens
        are those that generation begins with."""
        parts, before = list[tuple[str, str]](), ""
        for at in pair.answers():
            prompt = self._rendered(pair._replace(turns=pair.turns[:at]), opens_answer=True)
            whole = self._rendered(pair._replace(turns=pair.turns[: at + 1]))
            if not whole.startswith(prompt) or not prompt.startswith(before):
                raise ValueError(
                    "data: expected a chat template whose text of a prompt begins that of the whole conversation, "
                    "found another; change chat_template.jinja in the model's folder, or remove it to train on plain "
                    "text"
                )
            parts.append((prompt[len(before) :], whole[len(prompt) :]))
            before = whole
        return parts

    def _unwritten(self, pair: Pair) -> tuple[str, ...]:
        """The keys of messages that the template leaves out. ValueError if it leaves out a call, a tool or a turn."""
        without = {TOOLS: [pair._replace(tools=())] if pair.tools else []}
        for at, turn in enumerate(pair.turns):
            before, after = pair.turns[:at], pair.turns[at + 1 :]
            if turn["role"] not in ("user", "assistant") and turn["content"].strip():
                without.setdefault(f"messages of {turn['role']}", []).append(pair._replace(turns=(*before, *after)))
            for key in turn.keys() - {"role", "content"}:
                less = {name: value for name, value in turn.items() if name != key}
                without.setdefault(key, []).append(pair._replace(turns=(*before, less, *after)))
        whole = self._rendered(pair) if any(without.values()) else ""
        lost = [key for key, others in without.items() if any(self._is_text(one, whole) for one in others)]
        if found := [key for key in lost if key in (CALLS, TOOLS) or key.startswith("messages of ")]:
            raise ValueError(
                f"{pair.place}: expected what the chat template of the model writes, found {' and '.join(found)}, "
                "which it leaves out; change chat_template.jinja in the model's folder, or the data"
            )
        return tuple(sorted(lost))

    def _is_text(self, pair: Pair, text: str) -> bool:
        try:
            return self._rendered(pair) == text
        except ValueError:  # the template needs what is not there
            return False

    def _rendered(self, pair: Pair, *, opens_answer: bool = False) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                [dict(turn) for turn in pair.turns],
                tools=list(pair.tools) or None,
                tokenize=False,
                add_generation_prompt=opens_answer,
            )
        except Exception as error:  # a template raises what it likes
            raise ValueError(
                f"{pair.place}: expected messages that the chat template of the model writes, found others "
                f"({type(error).__name__}: {error}); change chat_template.jinja in the model's folder, or the data"
            ) from None
        return text

    def _ids(self, texts: list[str]) -> list[list[int]]:
        ids: list[list[int]] = self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return ids


def texts_of(folder: str | Path | None, vocab_size: int) -> Texts:
    """The tokenizer of a model's folder, or the project's own (one token for each byte) if there is none.

    ValueError if there is none and the vocabulary has fewer tokens than a byte has values.
    """
    if folder is not None and (Path(folder) / "tokenizer_config.json").exists():
        tokenizer = _loaded(folder)
        pairs = _PairEncoder(tokenizer)
        return Texts(
            lambda text: list(tokenizer(text)["input_ids"]),
            tokenizer.decode,
            lambda text: pairs.prompt(({"role": "user", "content": text},)),
            pairs.end,
        )
    if vocab_size < BYTES:
        raise ValueError(
            f"prompt: expected a model with a tokenizer in its folder, or with a vocabulary of {BYTES} bytes, found no "
            f"tokenizer and {vocab_size} tokens; give token ids: tokens=5,6,7"
        )
    return Texts(_as_bytes, _from_bytes, _as_bytes, BYTE_END)


def _as_bytes(text: str) -> list[int]:
    return list(text.encode())


def _from_bytes(ids: list[int]) -> str:
    return bytes(one for one in ids if one < BYTES).decode(errors="replace")


def save_byte_tokenizer(folder: str | Path) -> None:
    """Saves a tokenizer for byte tokens: token b is byte b, so encoding and decoding returns the same text. Its end
    token is BYTE_END."""
    end = chr(BYTE_END)  # by its own name: a letter for it would be taken for the end where a text has that letter
    letters = bytes_to_unicode() | {BYTE_END: end}
    bare = Tokenizer(BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
    bare.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    bare.decoder = ByteLevelDecoder()
    PreTrainedTokenizerFast(tokenizer_object=bare, clean_up_tokenization_spaces=False, eos_token=end).save_pretrained(
        folder
    )
