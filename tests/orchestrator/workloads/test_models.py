"""Models have their published sizes, their weights depend only on the seed, and no setting is silently ignored."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from harness.host_reads import HostReads
from peft import get_peft_model
from torch._subclasses.fake_tensor import FakeTensorMode

from orchestrator.wings.pretrained.adapters import add_lora, lora_config
from orchestrator.workloads.models import build_meta_model, build_model, model_config, token_losses

REPOSITORY = Path(__file__).resolve().parents[3]
FILES = sorted(file for file in (REPOSITORY / "conf" / "model").glob("*.yaml") if file.stem != "pretrained")
SMALL: dict[str, dict[str, Any]] = {
    "llama": {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    | {"num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen2": {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "gpt2": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},
}


def described(name: str) -> tuple[str, dict[str, Any]]:
    content = yaml.safe_load((REPOSITORY / "conf" / "model" / f"{name}.yaml").read_text())
    assert content.keys() == {"name", "model_type", "config", "path"}
    assert content["name"] == name
    return content["model_type"], content["config"]


def tokens(count: int = 2, seq: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.randint(0, 64, (count, seq + 1), generator=torch.Generator().manual_seed(0))
    return made[:, :-1], made[:, 1:].clone()


@pytest.mark.parametrize(
    ("name", "parameters", "tied"),
    [
        ("gpt2", 124_439_808, True),
        ("qwen2_5_0_5b", 494_032_768, True),
        ("qwen2_5_7b", 7_615_616_512, False),
        ("llama_1b", 1_235_814_400, True),
        ("llama2_7b", 6_738_415_616, False),
    ],
)
def test_the_published_models_have_their_published_number_of_parameters(name: str, parameters: int, tied: bool) -> None:
    start = time.process_time()
    model: Any = build_meta_model(*described(name))
    assert time.process_time() - start < 10  # about 1 s, mostly imports: no memory is written
    assert sum(one.numel() for one in model.parameters()) == parameters  # parameters() yields tied weights once
    assert {one.device.type for one in model.parameters()} == {"meta"}
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    assert (head.weight is embedding.weight) == tied


def test_the_tiny_model_has_the_parameters_of_the_formula() -> None:
    kind, config = described("llama_tiny")
    hidden, inner, layers, vocab = 192, 512, 4, 256
    layer = 4 * hidden**2 + 3 * hidden * inner + 2 * hidden
    expected = 2 * vocab * hidden + layers * layer + hidden
    assert sum(one.numel() for one in build_meta_model(kind, config).parameters()) == expected == 1_869_504


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_model_file_is_valid_and_every_key_reaches_the_model(path: Path) -> None:
    kind, config = described(path.stem)
    made = model_config(kind, config).to_dict()
    assert {key: made[key] for key in config} == config


@pytest.mark.parametrize("kind", SMALL)
def test_weights_depend_only_on_the_seed_and_the_global_random_state_is_unchanged(kind: str) -> None:
    before = torch.get_rng_state()
    first = build_model(kind, SMALL[kind], seed=1).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    again, other = (build_model(kind, SMALL[kind], seed=seed).state_dict() for seed in (1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)
    assert {one.dtype for one in first.values()} == {torch.float32}


@pytest.mark.parametrize("kind", SMALL)
def test_the_meta_model_has_the_names_shapes_and_ties_of_the_real_one(kind: str) -> None:
    real, meta = build_model(kind, SMALL[kind], seed=1), build_meta_model(kind, SMALL[kind])
    shapes = [{name: one.shape for name, one in model.named_parameters()} for model in (real, meta)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("kind", SMALL)
def test_a_training_step_is_repeatable_and_uses_neither_dropout_nor_a_cache(kind: str) -> None:
    model: Any = build_model(kind, SMALL[kind], seed=1)
    assert model.training
    assert all(one.p == 0 for one in model.modules() if isinstance(one, torch.nn.Dropout))
    inputs, labels = tokens()
    assert torch.equal(token_losses(model, inputs, labels), token_losses(model, inputs, labels))
    output = model(input_ids=inputs, use_cache=False)
    assert output.past_key_values is None
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("kind", SMALL)
def test_the_loss_is_the_sum_over_the_unmasked_tokens(kind: str) -> None:
    model = build_model(kind, SMALL[kind], seed=1)
    inputs, labels = tokens()
    labels[0, 3:] = -100
    logits = model(input_ids=inputs).logits.double()
    picked = F.log_softmax(logits, -1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    expected = -picked[labels != -100].sum()
    found = token_losses(model, inputs, labels)
    assert found.shape == ()
    assert found.dtype == torch.float32
    # The bound, with u = 2^-24: each of the 15 terms (below 5) has a sum of 64, then max, log and difference; then
    # follow 14 additions below 75.
    assert (labels != -100).sum() == 15
    assert abs(found.item() - expected.item()) < 2**-24 * (15 * (64 + 3 * 5) + 14 * 75)


def test_only_one_tensor_of_the_size_of_the_logits_is_saved_for_backward() -> None:
    model = build_model("llama", SMALL["llama"], seed=1).to(torch.bfloat16)
    inputs, labels = tokens()
    saved: dict[int, torch.dtype] = {}

    def keep(one: torch.Tensor) -> torch.Tensor:
        if one.numel() == inputs.numel() * 64 and one.shape[-1] == 64:
            saved[one.untyped_storage().data_ptr()] = one.dtype
        return one

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        loss = token_losses(model, inputs, labels)
    assert list(saved.values()) == [torch.float32]  # the log-probabilities; not the bf16 logits
    loss.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", SMALL)
def test_a_batch_without_labels_gives_zero_loss_and_zero_gradients(kind: str, dtype: torch.dtype) -> None:
    model = build_model(kind, SMALL[kind], seed=1).to(dtype)
    inputs, labels = tokens()
    loss = token_losses(model, inputs, torch.full_like(labels, -100))
    assert loss.dtype == torch.float32
    loss.backward()
    assert loss.item() == 0
    assert all(one.grad is not None and not one.grad.any() for one in model.parameters())


@pytest.mark.parametrize("kind", SMALL)
def test_a_token_attends_to_no_later_token_and_no_other_sequence(kind: str) -> None:
    model = build_model(kind, SMALL[kind], seed=1)
    inputs, _ = tokens()
    changed = inputs.clone()
    changed[0, 7:] = (changed[0, 7:] + 1) % 64
    first, second = (model(input_ids=one).logits for one in (inputs, changed))
    torch.testing.assert_close(first[0, :7], second[0, :7])
    torch.testing.assert_close(first[1], second[1])
    assert not torch.allclose(first[0, 7:], second[0, 7:])


@pytest.mark.parametrize("kind", SMALL)
def test_forward_and_backward_read_no_value_on_the_host(kind: str) -> None:
    with FakeTensorMode(allow_non_fake_inputs=False):  # .item() on a fake tensor raises
        model = build_model(kind, SMALL[kind], seed=1)
        loss = token_losses(model, torch.zeros(2, 12, dtype=torch.int64), torch.zeros(2, 12, dtype=torch.int64))
        loss.backward()
    assert all(one.grad is not None for one in model.parameters())


LLAMA = SMALL["llama"]
SUPPORTED = SMALL | {
    "gpt_neox": {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"},
    "mistral": LLAMA | {"sliding_window": 6},
    "mixtral": LLAMA | {"num_local_experts": 4},
    "gemma": LLAMA | {"head_dim": 8},
    "qwen3": LLAMA | {"head_dim": 8},
    "olmo2": LLAMA,
    "opt": {"vocab_size": 64, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"word_embed_proj_dim": 32},
    "phi3": LLAMA | {"pad_token_id": 0},
}


@pytest.mark.parametrize("tile", [None, 8])
@pytest.mark.parametrize("kind", SUPPORTED)
def test_no_operation_makes_the_host_wait_for_a_gpu(kind: str, tile: int | None) -> None:
    """Of the architectures with torch's attention. On real tensors, because transformers takes another way for fake
    ones."""
    model, (ids, labels) = build_model(kind, SUPPORTED[kind], seed=1), tokens()
    with HostReads() as reads:
        token_losses(model, ids, labels, tile).backward()
    assert reads.found == []


def test_no_operation_of_an_adapter_makes_the_host_wait_for_a_gpu() -> None:
    model, (ids, labels) = build_model("llama", SMALL["llama"], seed=1), tokens()
    wrapped = get_peft_model(model, lora_config(4, 8.0, []))
    with HostReads() as reads:
        token_losses(wrapped, ids, labels).backward()
    assert reads.found == []


def test_a_forward_of_transformers_alone_makes_the_host_wait_and_the_search_sees_it() -> None:
    model, (ids, _) = build_model("llama", SMALL["llama"], seed=1), tokens()
    with HostReads() as reads:
        model(input_ids=ids, use_cache=False)
    assert any("_local_scalar_dense" in read and "masking_utils" in read for read in reads.found)
    with HostReads() as reads:
        made = torch.tensor([1.0, 2.0])
        _ = made[made > 1].sum().item()
        made[made > 1] = made[:1]  # of a number torch 2.15 makes a masked_fill_, which waits for nothing
    assert {read.split()[0] for read in reads.found} == {"lift_fresh", "index", "_local_scalar_dense", "index_put_"}


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_the_mask_is_the_one_that_transformers_makes_itself(kind: str) -> None:
    model, (ids, labels) = build_model(kind, SUPPORTED[kind], seed=1), tokens()
    wanted = F.cross_entropy(model(input_ids=ids).logits.flatten(0, -2).float(), labels.flatten(), reduction="sum")
    assert torch.equal(token_losses(model, ids, labels), wanted)


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        ("llama", {"hidden_sise": 8}, "'model.config.hidden_sise' .* did you mean 'hidden_size'"),
        ("gpt2", {"n_layers": 2}, "did you mean 'n_layer'"),
        ("llama", {"zzz": 8}, "'model.config.zzz' is not a setting .* known: .*hidden_size"),
        ("llama", {"use_cache": True}, "'model.config.use_cache' is not a setting"),
        ("llama", {"dtype": "float16"}, "'model.config.dtype' is not a setting"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout: expected 0 .* found 0.1"),
        ("llama", {"rope_parameters": {"rope_tehta": 1.0}}, "rope_parameters.rope_tehta.* 'rope_theta'"),
        ("llama", {"rope_parameters": {"rope_type": "lama3"}}, "rope_type: expected one of .* found 'lama3'"),
        ("llama", {"hidden_size": "big"}, "not a llama: .*hidden_size"),
        ("llama", {"hidden_size": 130, "num_attention_heads": 4}, "not a llama: .*multiple"),
        ("gpt2", {"n_embd": 64, "n_head": 3}, "gpt2 cannot be built: .*divisible"),
        ("llama", {"hidden_act": "os.system"}, "llama cannot be built: .*os.system"),
        ("llama", {"hidden_size": -48}, "model.config.hidden_size: expected at least 1, found -48"),
        ("llama", {"vocab_size": 0}, "model.config.vocab_size: expected at least 2, found 0"),
        ("llama", {"vocab_size": 1}, "model.config.vocab_size: expected at least 2, found 1"),
        ("llama", {"num_hidden_layers": -1}, "num_hidden_layers: expected at least 1, found -1"),
        ("llama", {"num_attention_heads": 0}, "num_attention_heads: expected at least 1, found 0"),
        ("gpt2", {"n_embd": -48}, "model.config.n_embd: expected at least 1, found -48"),
        ("gpt2", {"n_layer": 0}, "model.config.n_layer: expected at least 1, found 0"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps: expected a finite number, found nan"),
        ("llama", {"rope_parameters": {"rope_theta": 1e300}}, "rope_theta: expected a finite number, found 1e.300"),
        ("lama", {}, "found 'lama'; did you mean 'llama'"),
        ("bert-like-nothing-at-all", {}, "model.model_type: expected a causal or masked language model"),
        ("whisper", {"is_encoder_decoder": True}, "found 'whisper', which transformers has as a model of another kind"),
        ("baichuan", {"auto_map": {"AutoModel": "a.B"}}, "code is in its own folder .*code from a folder is not run"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(kind: str, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_meta_model(kind, config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": None}, "model.config is not a llama: .*hidden_size"),
        ({"hidden_size": "64"}, "model.config is not a llama: .*hidden_size"),
        ({"hidden_size": -48}, "hidden_size: expected at least 1, found -48"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps: expected a finite number, found inf"),
    ],
)
def test_a_wrong_value_of_a_saved_configuration_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_config("llama", config, as_saved=True)


def test_a_rank_above_the_dimensions_of_every_matrix_is_refused() -> None:
    model = build_meta_model("llama", SMALL["llama"])
    with pytest.raises(
        ValueError, match=r"adapter\.rank: expected at most 32, as no matrix .* has more, found 100000000"
    ):
        add_lora(model, lora_config(10**8, 16.0, []))


def test_all_wrong_settings_are_reported_together() -> None:
    with pytest.raises(ValueError, match=r"hidden_sise.*\n.*n_layr.*\n.*found 0.5"):
        build_meta_model("llama", {"hidden_sise": 8, "n_layr": 2, "attention_dropout": 0.5})


@pytest.mark.full
def test_our_kernels_and_hugging_faces_kernels_package_work_in_one_process() -> None:
    """Runs in the root of the checkout, where our folder `kernels` comes first on the path."""
    program = (
        "import kernels\n"
        "assert callable(kernels.get_kernel), kernels.__path__\n"
        "import transformers.integrations.hub_kernels\n"
        "from zero_runtime.kernels import ops\n"
        "from orchestrator.workloads.models import build_model\n"
        f"print(type(build_model('llama', {SMALL['llama']!r}, seed=1)).__name__)"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "LlamaForCausalLM"
