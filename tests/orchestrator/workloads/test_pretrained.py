"""A local folder of weights is loaded as transformers loads it, with its tokenizer; adapters are exported alone."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.ranks import run_alone, run_ranks
from harness.read_back import LARGEST_CODES, write_read_back

from orchestrator import cli
from orchestrator.config import pretrained
from orchestrator.config.schema import (
    Adapter,
    AdapterKind,
    Data,
    Device,
    Model,
    ResolvedBatch,
    ResolvedResources,
    RunConfig,
    Tokenizer,
    to_dict,
)
from orchestrator.config.state_groups import Precision, Zero
from orchestrator.wings.pretrained.companions import write_companions
from orchestrator.workloads import sources
from zero_runtime.checkpoint.load import CheckpointReader, load_checkpoint
from zero_runtime.checkpoint.save import SaveSettings, save_checkpoint
from zero_runtime.errors import CheckpointError
from zero_runtime.precision import MixedPrecision

IDS = torch.arange(24).view(2, 12)
LORA = Adapter(AdapterKind.lora, rank=3, alpha=6.0)
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},  # with a tied head
    "llama": {
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
    },
}


def _write_folders(root: Path) -> dict[str, torch.Tensor]:
    """Writes models as transformers saves them, in several files, and one without the prefix in its names.

    Returns their logits.
    """
    import transformers
    from safetensors.torch import load_file, save_file

    found = {}
    for kind, config in KINDS.items():
        torch.manual_seed(7)
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **config)).eval()
        model.save_pretrained(root / kind, max_shard_size="40KB")
        with torch.no_grad():
            found[kind] = model(input_ids=IDS).logits
    bare = root / "bare"  # the layout of older GPT-2 folders: no prefix, masks stored as tensors
    bare.mkdir()
    (bare / "config.json").write_bytes((root / "gpt2" / "config.json").read_bytes())
    tensors = {}
    for file in (root / "gpt2").glob("*.safetensors"):
        tensors |= {name.removeprefix("transformer."): value for name, value in load_file(file).items()}
    save_file({**tensors, "h.0.attn.bias": torch.ones(1, 1, 32, 32)}, bare / "model.safetensors")
    found["bare"] = found["gpt2"]
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    root = tmp_path_factory.mktemp("folders")
    return root, run_alone(_write_folders, root)


def _config(folder: Path, stage: int = 3, weights: Any = None, **changes: Any) -> RunConfig:
    return RunConfig(
        model=pretrained.completed(Model("pretrained", path=str(folder))),
        zero=Zero(stage=stage),
        precision=Precision(MixedPrecision(weights=weights), compute="fp32"),
        batch=ResolvedBatch(micro=1, accumulation=1, global_size=2, seq=12),
        resources=ResolvedResources(Device.cpu, ranks=2, threads=1),
        data=Data(tokenizer=Tokenizer.bytes),
        **changes,
    )


def _runtime(config: RunConfig) -> Any:
    from orchestrator.worker.setup import build_runtime

    return build_runtime(config, torch.device("cpu"), None).runtime  # type: ignore[arg-type]


def _logits_at_stages(root: Path, names: list[str]) -> dict[tuple[str, int], torch.Tensor]:
    found = {}
    for name in names:
        for stage in (0, 3):
            runtime = _runtime(_config(root / name, stage))
            with torch.no_grad():
                found[name, stage] = runtime(input_ids=IDS, use_cache=False).logits
            runtime.close()
    return found


def test_a_model_loaded_from_a_folder_has_the_logits_of_transformers(folders) -> None:
    root, wanted = folders
    assert len(list((root / "gpt2").glob("*.safetensors"))) > 2
    for (name, stage), logits in run_ranks(_logits_at_stages, 2, root, list(wanted))[1].items():
        assert torch.equal(logits, wanted[name]), (name, stage)


def _other_architecture(root: Path) -> str:
    config = _config(root / "llama")
    config = replace(config, model=replace(config.model, path=str(root / "gpt2")))
    with pytest.raises(CheckpointError) as error:
        _runtime(config)
    return str(error.value)


def test_the_weights_of_another_architecture_are_refused_by_name(folders) -> None:
    (text,) = run_ranks(_other_architecture, 1, folders[0])
    assert "another architecture: expected the 21 tensors of this model, found 28" in text
    assert "lacks model.embed_tokens.weight" in text
    assert "transformer.h.0.attn.c_attn.bias" in text


# ---- LoRA ------------------------------------------------------------------------------------------------------------


def _adapted(root: Path, stage: int, weights: str | None = None) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """Logits before and after training, and the names in the checkpoint. A second runtime loads the checkpoint and must
    have the same logits."""
    from orchestrator.workloads.models import token_losses

    config = _config(root / "llama", stage, weights, adapter=LORA)
    runtime = _runtime(config)
    with torch.no_grad():
        first = runtime(input_ids=IDS, use_cache=False).logits
    for _ in range(2):
        runtime.backward(token_losses(runtime.model, IDS, IDS) / IDS.numel() / 2)
        runtime.step(1e-2)
    with torch.no_grad():
        last = runtime(input_ids=IDS, use_cache=False).logits
    trainer = {"config": to_dict(config)}
    path = save_checkpoint(
        runtime, root / f"lora{stage}{weights or ''}", step=2, trainer=trainer, settings=SaveSettings(with_frozen=False)
    )
    runtime.close()
    again = _runtime(_config(root / "llama", 3 - stage, weights, adapter=LORA))
    load_checkpoint(again, CheckpointReader.open(path))
    with torch.no_grad():
        assert torch.equal(again(input_ids=IDS, use_cache=False).logits, last)
    again.close()
    return first, last, list(CheckpointReader.open(path).state("master").names())


def _with_peft(base: Path, adapter: Path) -> torch.Tensor:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).eval()
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.full), 3])
def test_adapters_are_trained_on_a_frozen_base_and_exported_without_it(
    folders, stage: int, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    root, wanted = folders
    first, last, kept = run_ranks(_adapted, 2, root, stage)[0]
    assert torch.equal(first, wanted["llama"]), "an adapter's second matrix is zero at first"
    assert not torch.equal(first, last)
    assert kept
    assert all("lora_" in name for name in kept), "the base lies in its own folder"
    out = tmp_path / "adapter"
    assert cli.main(["export-weights", str(root / f"lora{stage}" / "step-00000002"), str(out), "--dtype", "fp32"]) == 0
    assert "only the adapters" in capsys.readouterr().out
    assert {one.name for one in out.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    # The runtime trains PEFT's own layers, so both run the same calls: equal weights give equal logits.
    assert torch.equal(run_alone(_with_peft, root / "llama", out), last)


@pytest.mark.parametrize(("stage", "code"), [(1, "int4"), pytest.param(3, "int8", marks=pytest.mark.full)])
def test_adapters_beside_codes_are_those_of_plain_lora_on_what_is_read_back(
    folders, stage: int, code: str, tmp_path: Path
) -> None:
    """Training, the reload at another stage, PEFT's use of the exported adapters and both merges have equal bits."""
    root, wanted = folders
    base, checkpoint = tmp_path / "read_back", root / f"lora{stage}{code}" / "step-00000002"
    logits = run_alone(write_read_back, root / "llama", base, LARGEST_CODES[code], IDS)
    assert not torch.equal(logits, wanted["llama"])
    first, last, _ = run_ranks(_adapted, 2, root, stage, code)[0]
    assert torch.equal(first, logits)
    _export_both(checkpoint, tmp_path)
    assert torch.equal(run_alone(_with_peft, base, tmp_path / "adapter"), last)
    (_, peft), (_, ours), _ = run_alone(_merged_by_both, base, tmp_path / "adapter", tmp_path / "merged")
    assert all(torch.equal(ours[one], peft[one]) for one in peft)


# By name: the folder of the base, and the adapters. The head of GPT-2 is tied to its embedding.
MERGES = {
    "llama": ("llama", LORA),
    "gpt2": ("gpt2", LORA),  # its layers are Conv1D: weights [inputs, outputs]
    "embedding": ("gpt2", replace(LORA, targets=["wte", "c_attn"])),
}


def _train_to_merge(root: Path) -> None:
    from orchestrator.workloads.models import token_losses

    for name, (kind, adapter) in MERGES.items():
        config = _config(root / kind, adapter=adapter)
        runtime = _runtime(config)
        for _ in range(2):
            runtime.backward(token_losses(runtime.model, IDS, IDS) / IDS.numel() / 2)
            runtime.step(1e-2)
        trainer = {"config": to_dict(config)}
        settings = SaveSettings(with_frozen=False)
        save_checkpoint(runtime, root / f"merge-{name}", step=2, trainer=trainer, settings=settings)
        runtime.close()


def _merged_by_both(base: Path, adapter: Path, ours: Path) -> tuple[Any, Any, Any]:
    """Logits and weights of PEFT's merge and of our folder; and the weights of the base."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    plain: Any = AutoModelForCausalLM.from_pretrained(base)
    weights = {name: value.detach().clone() for name, value in plain.named_parameters()}
    found = []
    for model in (
        PeftModel.from_pretrained(plain, adapter).merge_and_unload(),
        AutoModelForCausalLM.from_pretrained(ours),
    ):
        with torch.no_grad():
            logits = model.eval()(input_ids=IDS).logits
        found.append((logits, {name: value.detach() for name, value in model.named_parameters()}))
    return *found, weights


def _export_both(checkpoint: Path, to: Path) -> None:
    for words in (["adapter"], ["merged", "--merge"]):
        out = [str(checkpoint), str(to / words[0]), "--dtype", "fp32", *words[1:]]
        assert cli.main(["export-weights", *out]) == 0


def test_a_merged_export_is_the_model_that_peft_merges(folders, tmp_path: Path) -> None:
    root, _ = folders
    run_ranks(_train_to_merge, 2, root)
    for name, (kind, _) in MERGES.items():
        _export_both(root / f"merge-{name}" / "step-00000002", tmp_path / name)
        adapter, ours = (tmp_path / name / part for part in ("adapter", "merged"))
        (theirs, wanted), (logits, found), base = run_alone(_merged_by_both, root / kind, adapter, ours)
        # Both compute W + (B @ A) * scale in fp32 in this order, from the same numbers: the bits are equal.
        assert all(torch.equal(found[one], wanted[one]) for one in wanted)
        if name == "embedding":
            # The trained model had no adapter at its head, which is tied: two weights now. PEFT's merge changes both.
            assert {*found} - {*wanted} == {"lm_head.weight"}
            assert torch.equal(found["lm_head.weight"], base["transformer.wte.weight"])
            assert not torch.equal(found["lm_head.weight"], found["transformer.wte.weight"])
            continue
        assert wanted.keys() == found.keys()
        assert torch.equal(logits, theirs)
        assert not torch.equal(logits, folders[1][kind])
        # One rank reads whole matrices, and so makes the same products.
        (read,) = run_ranks(_logits_of_adapter, 1, adapter)
        assert torch.equal(read, logits)
    (told,) = run_ranks(_refusals_of_adapter, 1, tmp_path / "embedding" / "adapter", tmp_path / "llama" / "adapter")
    assert "one of an embedding or a head that are one weight" in told[0]
    assert "found adapter=lora" in told[1]


def _logits_of_adapter(folder: Path) -> torch.Tensor:
    config = _config(folder, stage=0)
    assert config.model.adapter == str(folder)
    runtime = _runtime(config)
    with torch.no_grad():
        found: torch.Tensor = runtime(input_ids=IDS, use_cache=False).logits
    runtime.close()
    return found


def _refusals_of_adapter(tied: Path, plain: Path) -> list[str]:
    found = []
    for config in (_config(tied), _config(plain, adapter=LORA)):
        with pytest.raises(CheckpointError) as error:
            _runtime(config)
        found.append(str(error.value))
    return found


def _wrong_target(root: Path) -> None:
    with pytest.raises(ValueError, match=r"adapter\.targets: .*no_such_layer"):
        _runtime(_config(root / "llama", adapter=replace(LORA, targets=["no_such_layer"])))


def test_an_adapter_target_that_does_not_exist_is_reported_by_name(folders) -> None:
    run_ranks(_wrong_target, 1, folders[0])


# ---- tokens ----------------------------------------------------------------------------------------------------------

TEXT = "if x:\n    grün = '漢字'\t# done\n" * 3


def _byte_tokenizer(folder: Path) -> tuple[list[int], str]:
    from transformers import AutoTokenizer

    from orchestrator.wings.pretrained.tokenizer import load_tokenizer, save_byte_tokenizer

    save_byte_tokenizer(folder)
    ids = load_tokenizer(folder)([TEXT])[0]
    return ids, AutoTokenizer.from_pretrained(folder).decode(ids)


def test_the_byte_tokenizer_encodes_text_as_bytes_and_decodes_them(tmp_path: Path) -> None:
    ids, text = run_alone(_byte_tokenizer, tmp_path)
    assert ids == list(TEXT.encode())
    assert text == TEXT


def _refusal_of_code(folder: Path) -> str:
    from orchestrator.wings.pretrained.tokenizer import load_tokenizer

    try:
        load_tokenizer(folder)
    except ValueError as error:
        return str(error)
    return ""


def test_a_tokenizer_with_code_in_its_folder_is_refused_without_impossible_advice(tmp_path: Path) -> None:
    found = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(found))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    told = run_alone(_refusal_of_code, tmp_path)
    assert "expected a tokenizer of transformers' own, found one that is code of its folder" in told
    assert "trust_remote_code" not in told
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("text", ['{"broken', '{"version": "1.0", "model": {}}'])
def test_a_tokenizer_that_cannot_be_read_is_one_error(text: str, tmp_path: Path) -> None:
    for name, content in {"config": '{"model_type": "llama"}', "tokenizer": text}.items():
        (tmp_path / f"{name}.json").write_text(content)
    assert "expected the files of a tokenizer" in run_alone(_refusal_of_code, tmp_path)


def test_the_tokenizer_of_the_folder_and_all_its_templates_go_beside_exported_weights(tmp_path: Path) -> None:
    folder, out = tmp_path / "model", tmp_path / "out"
    (folder / "additional_chat_templates").mkdir(parents=True)
    out.mkdir()
    names = ("tokenizer.json", "chat_template.jinja", "additional_chat_templates/default.jinja")
    for name in names:
        (folder / name).write_text(name)
    (folder / "README.md").write_text("not copied")
    model = {"path": str(folder), "model_type": "gpt2", "config": {"vocab_size": 300}}
    assert run_alone(write_companions, out, {"model": model}, "fp32") == f"tokenizer of {folder}"
    written = {str(file.relative_to(out)) for file in out.rglob("*") if file.is_file()}
    assert written - {"generation_config.json"} == {"config.json", *names}


def test_a_text_is_split_at_line_ends_before_it_is_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def encode(texts: list[str]) -> list[list[int]]:
        seen.extend(texts)
        return [[len(word) for word in text.split()] for text in texts]

    monkeypatch.setattr(sources, "PIECE_BYTES", 40)
    tokens = sources.as_tokens(bytearray(TEXT.encode()), encode)
    assert "".join(seen) == TEXT
    assert all(piece.endswith("\n") for piece in seen)
    assert len(seen) == 2
    assert tokens.dtype == np.int32
    assert tokens.tolist() == [len(word) for word in TEXT.split()]


# ---- what the command line says about a folder -----------------------------------------------------------------------


def test_a_folder_provides_the_models_name_architecture_and_configuration(folders) -> None:
    model = pretrained.completed(Model("pretrained", path=str(folders[0] / "gpt2")))
    assert (model.name, model.model_type, model.config["n_embd"]) == ("gpt2", "gpt2", 32)
    assert pretrained.problem(model) is None
    assert pretrained.completed(model) == model


def tensor_file(header: bytes, data: int = 0) -> bytes:
    return len(header).to_bytes(8, "little") + header + bytes(data)


ENTRY = '{"a": {"dtype": "%s", "shape": [2], "data_offsets": [%s]}}'
DAMAGED = [
    (b"", "found the file's end"),
    (b"\xff" * 100, "a header of"),
    (tensor_file(b"{")[:-1], "found the file's end"),
    (tensor_file(b"no header"), "JSONDecodeError"),
    (tensor_file((ENTRY % ("F32", "0, 8")).encode(), 7), "bytes 0 to 8 of the 7 that follow"),
    (tensor_file((ENTRY % ("F32", "-8, 0")).encode(), 8), "bytes -8 to 0"),
    (tensor_file((ENTRY % ("F32", "0, 4")).encode(), 8), "4 bytes for the shape"),
    (tensor_file((ENTRY % ("F8_E4M3", "0, 2")).encode(), 2), "found F8_E4M3"),
]


def test_problems_with_a_folder_are_reported(tmp_path: Path) -> None:
    def told(model: Model) -> str:
        return str(pretrained.problem(pretrained.completed(model)))

    folder = tmp_path / "gpt2-small"
    assert "must be a folder that is there" in told(Model("pretrained", path=str(tmp_path / "gpt2-smal")))
    folder.mkdir()
    assert f"model.path={folder}" in told(Model("pretrained", path=str(tmp_path / "gpt2-smal")))
    assert "must hold a config.json with a model_type" in told(Model("pretrained", path=str(folder)))
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert "must hold model.safetensors" in told(Model("pretrained", path=str(folder)))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert told(Model("pretrained", path=str(folder))) == "None"
    assert "brings its own architecture" in told(Model("x", "llama", {"vocab_size": 3}, str(folder)))
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "quantization_config": {}}))
    assert "weights that are not quantised" in told(Model("pretrained", path=str(folder)))
    (folder / "config.json").write_text('{"model_type":' * 100_000)
    assert "must hold a config.json with a model_type" in told(Model("pretrained", path=str(folder)))
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    model = Model("m", path=str(folder))
    for damaged, why in DAMAGED:
        (folder / "model.safetensors").write_bytes(damaged)
        problem = told(model)
        assert f"must hold whole weights: {folder}/model.safetensors: expected " in problem
        assert why in problem
    (folder / "model.safetensors.index.json").write_text("[]")
    assert "expected an index with a weight_map" in told(model)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "missing.safetensors"}}')
    assert "missing.safetensors: expected a file" in told(model)
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")  # reading it would block
    assert "must hold a config.json with a model_type" in told(Model("pretrained", path=str(folder)))
