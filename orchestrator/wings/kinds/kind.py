"""What kind of model a configuration describes, and what a batch of that kind holds. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from orchestrator.config.parallel import Parallel
from orchestrator.config.schema import Batch, Data, DataKind, Loss, LossKind, Measure, Model, RunConfig, Train
from orchestrator.config.strict import Broken, Word


class ModelKind(Word):
    """The kinds of models that are trained here, in words."""

    causal = "causal language model"
    masked = "masked language model"
    encoder_decoder = "encoder-decoder"
    image = "image classifier"


# The architectures of the kinds, by transformers' model_type; all others are asked for as causal language models.
TYPES = {
    ModelKind.masked: "albert bert camembert convbert data2vec-text deberta deberta-v2 distilbert electra ernie "
    "eurobert megatron-bert mobilebert modernbert mpnet rembert roberta roberta-prelayernorm xlm-roberta "
    "xlm-roberta-xl",
    ModelKind.encoder_decoder: "bart blenderbot blenderbot-small m2m_100 marian mbart mt5 nllb-moe pegasus plbart "
    "switch_transformers t5 umt5",
    ModelKind.image: "beit convnext convnextv2 data2vec-vision deit dinov2 swin swinv2 vit vit_msn",
}
KINDS = {model_type: kind for kind, types in TYPES.items() for model_type in types.split()}
# Architectures that read positions relative to each other: their n_positions is the length they were trained with.
RELATIVE = ("mt5", "switch_transformers", "t5", "umt5")
# Architectures whose first position is the one after the filling token, so that as many positions are never used.
OFFSET = ("camembert", "data2vec-text", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl")
LENGTH_KEYS = ("max_position_embeddings", "n_positions")
# The keys of transformers' configurations that say how many experts a layer has, and the architectures that have some
# without such a key and without "moe" in their name.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
WITH_EXPERTS = (
    *("mixtral", "dbrx", "deepseek_v2", "deepseek_v3", "deepseek_v32", "gpt_oss", "jamba", "llama4_text"),
    "switch_transformers",
)
# Architectures of which each packed sample is tested to have the logits that it has alone, and the sliding windows of
# those that have one where their configuration names none.
PACKED = (
    "cohere cohere2 ernie4_5 exaone4 gemma gemma2 gemma3_text glm glm4 gpt2 gpt_bigcode gpt_neox gptj granite llama "
    "mistral mixtral olmo olmo2 olmo3 opt phi phi3 qwen2 qwen3 qwen3_moe smollm3 stablelm starcoder2"
)
WINDOWS = dict.fromkeys(("cohere2", "exaone4", "gemma2", "gemma3_text", "mistral", "olmo3"), 4096)
NOT_PACKED = ("data.packing=false",)
ROUTED = "routing decides how many tokens an expert gets"


def kind_of(model_type: str | None, config: Mapping[str, Any]) -> ModelKind:
    """The kind of a model, by its architecture. A configuration that names a causal class, or says that it is a
    decoder alone, is a causal language model of an architecture that has both."""
    kind = KINDS.get(model_type or "", ModelKind.causal)
    return ModelKind.causal if kind in (ModelKind.masked, ModelKind.encoder_decoder) and is_decoder(config) else kind


def is_decoder(config: Mapping[str, Any]) -> bool:
    """Whether a configuration names a causal class, or says that it is a decoder alone."""
    return bool(config.get("is_decoder")) or any("ForCausalLM" in str(one) for one in config.get("architectures") or ())


def is_causal(model: Model) -> bool:
    """Whether a sample of the model is a sequence of tokens, each of whose labels is the next token."""
    return kind_of(model.model_type, model.config) is ModelKind.causal


def has_own_batches(config: RunConfig) -> bool:
    """Whether a sample is more than a sequence of tokens, each of whose labels is the next token."""
    return config.data.packing or not is_causal(config.model)


def experts_of(model_type: str | None, config: Mapping[str, Any]) -> str:
    """What says that the model is a mixture of experts; empty if it is not one."""
    if model_type and ("moe" in model_type or model_type in WITH_EXPERTS):
        return f"model.model_type={model_type}"
    inner = (value for key, value in config.items() if key in ("text_config", "ffn_config"))
    for one in (config, *(value for value in inner if isinstance(value, Mapping))):
        found = ((key, one.get(key)) for key in EXPERTS)
        if many := [f"model.config.{key}={many}" for key, many in found if isinstance(many, int) and many > 1]:
            return many[0]
    return ""


class SampleShape(NamedTuple):
    """One sample of a batch: the shapes of its inputs and of its labels (int64). is_image: the inputs are fp32, else
    token ids in int64."""

    inputs: tuple[int, ...]
    labels: tuple[int, ...]
    is_image: bool = False

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes of the inputs and of the labels."""
        return (4 if self.is_image else 8) * math.prod(self.inputs), 8 * math.prod(self.labels)

    @property
    def tokens(self) -> int:
        """The tokens of a sequence; of an image the patches of 16 x 16, or 1."""
        return max(1, math.prod(self.inputs[1:]) // 256) if self.is_image else self.labels[0]

    def amount(self, samples: int) -> str:
        """What a step of so many samples is counted in: "1,024 tokens", or "8 images"."""
        return f"{samples:,} images" if self.is_image else f"{samples * self.labels[0]:,} tokens"

    @property
    def words(self) -> str:
        """What it is, in words."""
        if self.is_image:
            return f"images of {' x '.join(map(str, self.inputs[1:]))}"
        if len(self.inputs) > 1:
            return f"sources and targets of {self.inputs[1]:,} tokens each"
        return f"sequences of {self.inputs[0]:,} tokens"


class PackedShape(SampleShape):
    """That of a row that samples share: its inputs are token ids and positions."""

    @property
    def words(self) -> str:
        return f"packed rows of {self.labels[0]:,} tokens"


def sample_of(config: RunConfig) -> SampleShape:
    """What a sample of the configuration holds. An encoder-decoder's inputs are the rows source and decoder's input,
    and with data=pairs which places of the source count; those of a packed row are token ids and positions."""
    model, seq = config.model, config.batch.seq
    kind = kind_of(model.model_type, model.config)
    if kind is ModelKind.image:
        size = model.config.get("image_size", 224)
        sides = tuple(size) if isinstance(size, list | tuple) else (size, size)
        return SampleShape((model.config.get("num_channels", 3), *sides), (1,), is_image=True)
    if config.data.packing:
        return PackedShape((2, seq), (seq,))
    if kind is ModelKind.encoder_decoder:
        return SampleShape((3 if config.data.kind is DataKind.pairs else 2, seq), (seq,))
    return SampleShape((seq,), (seq,))


def labels_of(model: Model, seq: int) -> int:
    """The labels of a sample: one for each token of a sequence, or one for an image."""
    return 1 if kind_of(model.model_type, model.config) is ModelKind.image else seq


def problem(
    needs_data: bool,
    model: Model,
    data: Data,
    batch: Batch,
    parallel: Parallel,
    loss: Loss,
    measure: Measure,
    train: Train,
) -> Broken | None:
    """The first rule that settings break by the kind of the model. needs_data: it is to be trained."""
    kind = kind_of(model.model_type, model.config)
    if batch.seq < 2 and kind is not ModelKind.image:
        return Broken("batch.seq must be at least 2", str(batch.seq), (f"batch.seq={Batch().seq}",))
    broken = _too_long(model, kind, batch.seq) or (_not_packed(model, data, batch, parallel) if data.packing else None)
    if broken or kind is ModelKind.causal:
        return broken
    name = f"the model is of the kind {kind}"
    generates = measure.steps is None and train.examples > 0
    is_odd = batch.seq not in (1, Batch().seq)
    asked = (
        (
            parallel.group == 1,
            f"parallel.tp and sp divide causal language models; {name}",
            "a division",
            "parallel=none",
        ),
        (not generates, f"train.examples continues texts; {name}", str(train.examples), "train.examples=0"),
        *(
            (
                (not is_odd, f"batch.seq is the length of a text; {name}", str(batch.seq), "batch.seq=1"),
                (
                    data.kind is DataKind.synthetic or not needs_data,
                    f"only data=synthetic makes images; {name}",
                    f"data={data.kind}",
                    "data=synthetic",
                ),
                # Last: `fit` tries both options, and of a line all of whose points are refused says what all break.
                (loss.kind is LossKind.full, f"loss=tiled is of tokens; {name}", "loss=tiled", "loss=full"),
            )
            if kind is ModelKind.image
            else ()
        ),
        (
            kind is not ModelKind.masked or data.kind is not DataKind.pairs,
            f"data=pairs has responses to generate; {name}",
            "data=pairs",
            "data=text",
        ),
    )
    return next((Broken(rule, found, (fix,)) for holds, rule, found, fix in asked if not holds), None)


def _not_packed(model: Model, data: Data, batch: Batch, parallel: Parallel) -> Broken | None:
    """Why samples of this kind cannot share rows."""
    if data.kind is not DataKind.pairs:
        return Broken("data.packing=true packs prompts and responses, of data=pairs", f"data={data.kind}", NOT_PACKED)
    if model.model_type not in PACKED.split():
        some = "llama, mistral, qwen2, qwen3, gemma3_text, phi3 or gpt2"
        rule = f"data.packing needs an architecture with which it is tested, such as {some}"
        return Broken(rule, f"model.model_type={model.model_type}", NOT_PACKED)
    if parallel.sp > 1:
        rule = "parallel.sp divides sequences, and not rows that samples share"
        return Broken(rule, "data.packing=true", (*NOT_PACKED, "parallel.sp=1"))
    window = model.config.get("sliding_window", WINDOWS.get(model.model_type))
    if model.config.get("use_sliding_window", True) and isinstance(window, int) and window < batch.seq:
        rule = f"data.packing needs a batch.seq of at most the model's sliding_window, {window}"
        return Broken(rule, str(batch.seq), (f"batch.seq={window}", *NOT_PACKED))
    return None


def _too_long(model: Model, kind: ModelKind, seq: int) -> Broken | None:
    """That the model has fewer positions than a sequence has tokens."""
    if model.model_type in RELATIVE or kind is ModelKind.image:
        return None
    for key in LENGTH_KEYS:
        longest = model.config.get(key)
        if isinstance(longest, int) and model.model_type in OFFSET:
            filling = model.config.get("pad_token_id", 1)
            longest -= 1 + (filling if isinstance(filling, int) else 0)
        if isinstance(longest, int) and seq > longest:
            return Broken(
                f"batch.seq must be at most the model's {key}, {longest}", str(seq), (f"batch.seq={longest}",)
            )
    return None
