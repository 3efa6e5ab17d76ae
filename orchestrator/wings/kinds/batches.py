"""The data of models that are no causal language models: masked tokens, sources with targets, images with classes.
And of those that are, rows that several samples share."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchestrator.config.schema import DataKind, Model, RunConfig
from orchestrator.wings.kinds.kind import ModelKind, SampleShape, kind_of, sample_of
from orchestrator.wings.pairs.packing import PackedRows
from orchestrator.wings.pairs.pairs_file import read_pairs
from orchestrator.wings.pairs.windows import Encoded, bytes_of_pairs, unread_note
from orchestrator.workloads.data import IGNORED_LABEL, TokenBatch, TokenData, load_data, split
from orchestrator.workloads.models import model_config
from orchestrator.workloads.sources import SYNTHETIC_WINDOWS, Encode, IntArray, Windows, random_bits

MASKING, IMAGES, CLASSES = 2, 3, 4  # streams of random bits, next to those of sources.py
MASKED_SHARE = 0.15  # of the tokens of a sequence; of these as BERT has it (arXiv 1810.04805, section 3.1):
REPLACED, RANDOM = 0.8, 0.1  # by the mask token, by a random one; the others stay
MASK_TOKENS = ("[MASK]", "<mask>")


class KindData(TokenData):
    """Training and validation samples whose windows make their own batches."""

    def _batch(self, indices: IntArray) -> TokenBatch:
        made: TokenBatch = self.windows.batch(indices)  # type: ignore[attr-defined]
        return made


def build(config: RunConfig, encode: Encode | None, encode_pairs: Any) -> TokenData:
    """The data of a configuration with batches of its own. The arguments are those of `load_data`.

    ValueError if the data cannot be read, have too few samples, or a tokenizer has no mask token.
    """
    kind, data, seq = kind_of(config.model.model_type, config.model.config), config.data, config.batch.seq
    if kind is ModelKind.image:
        return _made(config, "synthetic images", Images(config, sample_of(config)), b"")
    if data.kind is DataKind.pairs and not data.packing:
        assert data.path is not None
        pairs = (encode_pairs.encode if encode_pairs else bytes_of_pairs)(read_pairs(Path(data.path)))
        translated = Translations(pairs, seq, config)
        return _made(
            config,
            f"pairs:{Path(data.path).name}",
            translated,
            translated.stored,
            (*translated.notes, *unread_note(pairs)),
        )
    # A window is a sequence and the token after it; that of an encoder-decoder is a source and its continuation.
    base = load_data(
        str(data.kind),
        data.path,
        seq=2 * seq - 1 if kind is ModelKind.encoder_decoder else seq,
        seed=config.seed,
        vocab_size=int(config.model.config["vocab_size"]),
        validation_fraction=data.validation_fraction,
        encode=encode,
        encode_pairs=encode_pairs,
    )
    if data.packing:
        rows = PackedRows(base, seq)
        digest, notes = hashlib.sha256(f"packed {base.hash}".encode()).hexdigest()[:12], (*base.notes, rows.note)
        return KindData(base.name, digest, base.seed, rows, rows.train, base.validation_windows, notes)
    windows = (
        Continuations(base.windows, seq, Ids.of(config.model))
        if kind is ModelKind.encoder_decoder
        else Masked(base.windows, config)
    )
    return _made(config, base.name, windows, base.hash.encode(), base.notes)


def _made(config: RunConfig, name: str, windows: Windows, content: bytes, notes: tuple[str, ...] = ()) -> TokenData:
    """The data over these windows. content: what their hash covers, next to what decides a sample."""
    fraction = config.data.validation_fraction
    if windows.count < (2 if fraction else 1):
        raise ValueError(
            f"data: expected at least 2 samples, for training and validation, found {windows.count} in {name}; give "
            "more, or data.validation_fraction=0"
        )
    about = {"seed": config.seed, "sample": sample_of(config), "windows": type(windows).__name__, "fraction": fraction}
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode() + b"\n" + content).hexdigest()[:12]
    train, held_out = split(windows.count, fraction)
    return KindData(name, digest, config.seed, windows, train, held_out, notes)


class Masked(Windows):
    """Sequences in which MASKED_SHARE of the tokens are to be found again; which ones is decided by the seed and the
    window alone, so that every epoch and every number of ranks masks alike. The labels of all others are ignored."""

    def __init__(self, windows: Windows, config: RunConfig) -> None:
        super().__init__(config.batch.seq)
        self.count, self._windows, self._seed = windows.count, windows, config.seed
        self._vocab = int(config.model.config["vocab_size"])
        self._mask = mask_token(config)
        self._masked = max(1, round(MASKED_SHARE * self._seq))

    def read(self, indices: IntArray) -> IntArray:
        return self._windows.read(indices)

    def counted(self, indices: IntArray) -> int:
        return len(indices) * self._masked

    def batch(self, indices: IntArray) -> TokenBatch:
        """[count, seq] both."""
        ids = np.ascontiguousarray(self.read(indices)[:, : self._seq])
        labels = np.full_like(ids, IGNORED_LABEL)
        for row, index in enumerate(indices):
            bits = random_bits(3 * self._seq, self._seed, MASKING, int(index)).reshape(3, self._seq)
            places = np.argsort(bits[0], kind="stable")[: self._masked]
            labels[row, places] = ids[row, places]
            fate = (bits[1, places] >> np.uint64(11)) * 2.0**-53
            random = (bits[2, places] % np.uint64(self._vocab)).astype(np.int64)
            ids[row, places[fate < REPLACED]] = self._mask
            drawn = (fate >= REPLACED) & (fate < REPLACED + RANDOM)
            ids[row, places[drawn]] = random[drawn]
        return TokenBatch(ids, labels)


def mask_token(config: RunConfig) -> int:
    """The id that stands for a masked token: the tokenizer's, or the last of the vocabulary where a token is a byte,
    which UTF-8 never has. ValueError if the tokenizer has none."""
    if config.data.tokenizer != "model":
        return int(config.model.config["vocab_size"]) - 1
    assert config.model.path is not None
    tokenizer = json.loads(Path(config.model.path, "tokenizer.json").read_text(encoding="utf-8"))
    for one in tokenizer.get("added_tokens") or ():
        if one.get("content") in MASK_TOKENS:
            return int(one["id"])
    raise ValueError(
        f"data.tokenizer: expected a mask token ({' or '.join(MASK_TOKENS)}) for a masked language model, found none "
        f"in {config.model.path}; use data.tokenizer=bytes, or correct the folder"
    )


class Ids(NamedTuple):
    """Ids of the model's special tokens: what fills sequences up, and what a decoder reads first."""

    filling: int
    start: int

    @classmethod
    def of(cls, model: Model) -> Ids:
        """Those of its configuration with the defaults of its class; the filling starts where no start is set, as in
        T5."""
        assert model.model_type is not None
        settings: Any = model_config(model.model_type, model.config, as_saved=model.path is not None)
        filling = getattr(settings, "pad_token_id", None) or 0
        start = getattr(settings, "decoder_start_token_id", None)
        return cls(filling, filling if start is None else start)

    def decoder_reads(self, targets: IntArray) -> IntArray:
        """What the decoder reads to write the targets, [count, seq] int64: its first token, then theirs."""
        return np.concatenate([np.full_like(targets[:, :1], self.start), targets[:, :-1]], axis=1)


class Continuations(Windows):
    """A text's sequences as sources, and what follows them as targets, as a prefix language model learns (arXiv
    1910.10683, section 3.2.3)."""

    def __init__(self, windows: Windows, seq: int, ids: Ids) -> None:
        super().__init__(seq)
        self.count, self._windows, self._ids = windows.count, windows, ids

    def read(self, indices: IntArray) -> IntArray:
        return self._windows.read(indices)

    def batch(self, indices: IntArray) -> TokenBatch:
        """Inputs [count, 2, seq]: source and decoder's input; labels [count, seq]."""
        tokens = self.read(indices)
        targets = tokens[:, self._seq :].copy()
        inputs = np.stack([tokens[:, : self._seq], self._ids.decoder_reads(targets)], axis=1)
        return TokenBatch(inputs, targets)


class Translations(Windows):
    """Prompts as sources and responses as targets, each cut to seq tokens or filled up to them."""

    def __init__(self, pairs: Sequence[Encoded], seq: int, config: RunConfig) -> None:
        super().__init__(seq)
        kept = [one for one in pairs if one.answer]
        self.count, self._ids = len(kept), Ids.of(config.model)
        self._cut = sum(max(len(one.prompt), len(one.answer)) > seq for one in kept)
        self._sources, self._source_sizes = self._filled([one.prompt for one in kept])
        self._targets, self._target_sizes = self._filled([one.answer for one in kept])
        most = max((int(one.max(initial=0)) for one in (self._sources, self._targets)), default=0)
        if most >= int(config.model.config["vocab_size"]):
            raise ValueError(
                f"data.tokenizer: expected tokens below the model's vocab_size, {config.model.config['vocab_size']}, "
                f"found {most}; use data.tokenizer=bytes, or correct the folder"
            )

    def _filled(self, texts: Sequence[Sequence[int]]) -> tuple[NDArray[np.int32], IntArray]:
        """The tokens of each text, [count, seq], and their sizes, at least 1: attention needs a token."""
        made = np.full((len(texts), self._seq), self._ids.filling, dtype=np.int32)
        for row, text in enumerate(texts):
            made[row, : len(text)] = text[: self._seq]
        return made, np.asarray([min(max(len(text), 1), self._seq) for text in texts], dtype=np.int64)

    @property
    def stored(self) -> bytes:
        """What the hash of the data covers."""
        return b"".join(one.tobytes() for one in (self._sources, self._source_sizes, self._targets, self._target_sizes))

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know about pairs that the samples do not hold."""
        return (f"{self._cut} of {self.count} pairs are longer than batch.seq and lose their end",) if self._cut else ()

    def read(self, indices: IntArray) -> IntArray:
        return self._targets[indices].astype(np.int64)

    def counted(self, indices: IntArray) -> int:
        return int(self._target_sizes[indices].sum())

    def batch(self, indices: IntArray) -> TokenBatch:
        """Inputs [count, 3, seq]: source, decoder's input, which places of the source count; labels [count, seq]."""
        targets, places = self.read(indices), np.arange(self._seq)
        counts = (places < self._source_sizes[indices, None]).astype(np.int64)
        inputs = np.stack([self._sources[indices], self._ids.decoder_reads(targets), counts], axis=1)
        targets[places >= self._target_sizes[indices, None]] = IGNORED_LABEL
        return TokenBatch(inputs, targets)


class Images(Windows):
    """Synthetic images, generated when they are read: the picture of their class, and as much noise."""

    def __init__(self, config: RunConfig, sample: SampleShape) -> None:
        super().__init__(1)
        self.count, self._seed, self._shape = SYNTHETIC_WINDOWS, config.seed, sample.inputs
        settings = config.model.config
        self._classes = len(settings.get("id2label") or ()) or int(settings.get("num_labels", 2))
        self._picture = functools.lru_cache(maxsize=64)(functools.partial(self._noise, CLASSES))

    def read(self, indices: IntArray) -> IntArray:
        """The classes, [count, 1] int64."""
        return (indices % self._classes)[:, None].astype(np.int64)

    def batch(self, indices: IntArray) -> TokenBatch:
        """Inputs [count, channels, height, width] fp32 with mean 0; labels [count, 1]."""
        labels = self.read(indices)
        images = [
            self._picture(int(of)) + self._noise(IMAGES, int(index))
            for index, of in zip(indices, labels[:, 0], strict=True)
        ]
        made: Any = np.stack(images) if images else np.empty((0, *self._shape), dtype=np.float32)
        return TokenBatch(made, labels)

    def _noise(self, stream: int, index: int) -> NDArray[np.float32]:
        """Uniform between -1 and 1."""
        count = int(np.prod(self._shape))
        halves = random_bits(-(-count // 2), self._seed, stream, index).view(np.uint32)[:count]
        made: NDArray[np.float32] = (halves * 2.0**-31 - 1).astype(np.float32).reshape(self._shape)
        return made
