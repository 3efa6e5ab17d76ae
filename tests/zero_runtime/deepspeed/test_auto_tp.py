"""tensor_parallel in the configuration of a script divides layers between ranks, with plain PyTorch's numbers."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness.divided import adapted, model_of
from harness.exact import LION, RATES, STEPS, ExactModel, Row, inputs, loss_of, plain
from harness.ranks import run_ranks
from harness.seed_loop import SNIPPETS, initialize_quietly, run_script
from torch import nn

import zero_runtime
from zero_runtime.errors import ParameterReadError, PlanError

STAGES = (0, 1, 2, 3)
TWO = {"autotp_size": 2}
LION_SECTION = {"type": "Lion", "params": {"lr": RATES[LION], "betas": [0.5, 0.5], "weight_decay": 0.0}}


def engine_of(model: nn.Module, stage: int, tensor: dict[str, Any] = TWO, **others: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "tensor_parallel": tensor,
        **others,
    }
    return initialize_quietly(model=model, config=config)[0]


def weights_of(engine: Any) -> dict[str, torch.Tensor]:
    with engine.runtime.full_params() as whole:
        return {name: value.clone() for name, value in whole.items()}


# ---- numbers ---------------------------------------------------------------------------------------------------------


def first_norm(ranks: int) -> float:
    model = ExactModel().double()
    for rank in range(ranks):
        x, y = inputs(0, rank, 0)
        (loss_of(model, x.double(), y.double()) / ranks).backward()
    return math.sqrt(sum(float(param.grad.square().sum()) for param in model.parameters() if param.grad is not None))


def differing(accumulation: int) -> list[str]:
    """The stages at which losses, norms or weights are not those of plain PyTorch, in exact arithmetic."""
    found, data_world = [], dist.get_world_size() // 2
    row = Row(0, LION, micro_batches=accumulation)
    wanted, norm = plain(row, data_world), first_norm(data_world)
    for stage in STAGES:
        model = ExactModel()
        engine = engine_of(model, stage, optimizer=LION_SECTION, gradient_accumulation_steps=accumulation)
        assert (engine.dp_world_size, engine.mp_world_size, engine.autotp_size()) == (data_world, 2, 2)
        assert divmod(dist.get_rank(), 2) == (engine.get_data_parallel_rank(), engine.get_tensor_parallel_rank())
        norms = []
        for step in range(STEPS[LION]):
            for micro in range(accumulation):
                x, y = inputs(step, engine.get_data_parallel_rank(), micro)
                engine.backward(loss_of(engine, x, y))
                engine.step()
            norms.append(engine.get_global_grad_norm())
        if accumulation == 1 and norms[0] != norm:
            found.append(f"stage {stage}: norm {norms[0]}, expected {norm}")
        weights = weights_of(engine)
        found += [f"stage {stage}: {name}" for name, value in wanted.weights.items() if (weights[name] != value).any()]
        engine.destroy()
    return found


@pytest.mark.parametrize(
    ("world", "accumulation"),
    [(2, 1), pytest.param(2, 2, marks=pytest.mark.full), *(pytest.param(4, k, marks=pytest.mark.full) for k in (1, 2))],
)
def test_two_slices_have_plain_torchs_bits_at_every_stage(world: int, accumulation: int) -> None:
    assert run_ranks(differing, world, accumulation) == [[]] * world


# DeepSpeed 0.19.8 on two CPU ranks, autotp_size 2, stage 1, the three batches of `losses`: rank 0's.
DEEPSPEED = (4.545950889587402, 4.523862838745117, 4.595806121826172)


def losses(stage: int) -> list[float]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    params = {"lr": 1e-2, "weight_decay": 0.0}
    engine = engine_of(model, stage, gradient_clipping=0.5, optimizer={"type": "AdamW", "params": params})
    assert engine.train_batch_size() == 4, "DeepSpeed counts the ranks of a group too"
    found = []
    for step in range(3):
        ids = torch.randint(1, 96, (2, 12), generator=torch.Generator().manual_seed(step))
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    engine.destroy()
    return found


def test_a_llama_has_deepspeeds_losses() -> None:
    """Up to the roundings of a loss of 4.6 in fp32, which another build of torch may give otherwise."""
    for found in run_ranks(losses, 2, 1):
        assert found == pytest.approx(DEEPSPEED, abs=64 * 4.6 * 2.0**-24)


# ---- one batch for a group -------------------------------------------------------------------------------------------


def two_steps(engine: Any, kind: str) -> None:
    for step in range(2):
        own = dist.get_rank() * (step == 1 or kind == "shape")
        ids = torch.arange(6 + own * (kind == "shape")).view(1, -1)
        engine.backward(engine(input_ids=ids, labels=ids.roll(own)).loss)
        engine.step()


def refused_batches() -> list[str]:
    """The errors of inputs that differ: in shape, in the first step, and in labels alone, in the second."""
    told = []
    for kind in ("shape", "labels"):
        engine = engine_of(model_of("llama"), 1)
        with pytest.raises(PlanError) as caught:
            two_steps(engine, kind)
        told.append(f"{engine.global_steps}: {caught.value}")
        engine.destroy()
    return told


def test_other_batches_within_a_group_are_refused_on_all_of_its_ranks() -> None:
    """DeepSpeed 0.19.8 compares the first batch alone: "Data inconsistency within the TP group"."""
    expected = "parallel.tp=2: expected the 2 ranks of each group to be given the same batch, found different"
    for first, second in run_ranks(refused_batches, 2):
        assert first.startswith(f"0: {expected} inputs of the model; slice the data by rank // 2 of world // 2")
        assert second.startswith(f"1: {expected} tokens or labels on ranks [0, 1]; slice the data")


def loaded() -> tuple[list[list[float]], int]:
    rows = torch.arange(16.0).view(8, 2)
    config = {"train_micro_batch_size_per_gpu": 2, "tensor_parallel": TWO}
    engine, _, loader, _ = initialize_quietly(model=ExactModel(), config=config, training_data=rows)
    found = [batch.flatten().tolist() for batch in loader]
    engine.destroy()
    return found, len(rows)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_the_loader_gives_the_ranks_of_a_group_one_batch(world: int) -> None:
    by_rank = run_ranks(loaded, world)
    assert by_rank[0::2] == by_rank[1::2]
    seen = [value for batches, _ in by_rank[::2] for batch in batches for value in batch]
    assert sorted(seen) == list(map(float, range(16)))


# ---- layers by name --------------------------------------------------------------------------------------------------


def eighths(model: nn.Module) -> nn.Module:
    """The model with weights of few bits, so that every order of a sum has the same bits."""
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randint(-8, 9, param.shape, generator=draw) / 8)
    return model


def specs(**kinds: str) -> dict[str, Any]:
    """A partition_config with a spec for each layer; that of "all" is for every one."""
    found: list[dict[str, Any]] = []
    for name, kind in kinds.items():
        own = {"partition_type": kind} if kind != "gathered" else {"partition_type": "column", "gather_output": True}
        found.append({"patterns": [r"(.*\.)?weight$" if name == "all" else rf"{name[-1]}\.weight$"], **own})
    return {"partition_config": {"use_default_specs": False, "layer_specs": found}}


NAMED_LAYERS = {
    "linear": (lambda: nn.Linear(10, 10), specs(all="gathered")),
    "sequential": (lambda: nn.Sequential(nn.Linear(10, 10)), specs(all="gathered")),
    "pair": (lambda: nn.Sequential(nn.Linear(10, 12), nn.ReLU(), nn.Linear(12, 10)), specs(_0="column", _2="row")),
    "first": (lambda: nn.Sequential(nn.Linear(10, 12), nn.ReLU(), nn.Linear(12, 10)), specs(_0="gathered")),
}


def named_layers(stages: tuple[int, ...]) -> list[str]:
    """The models and stages whose weights are not plain PyTorch's after two steps."""
    found, size = [], dist.get_world_size()
    sgd = {"type": "SGD", "params": {"lr": 0.125}}
    for name, (make, partition) in NAMED_LAYERS.items():
        rows = torch.arange(-10.0, 10.0).view(2, 10) / 4
        plain = eighths(make())
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.125)
        for _ in range(2):
            (plain(rows) * rows).sum().div(16).backward()
            optimizer.step()
            optimizer.zero_grad()
        for stage in stages:
            engine = engine_of(eighths(make()), stage, {"autotp_size": size, **partition}, optimizer=sgd)
            divided = sum(param.numel() for param in make().parameters())
            assert stage == 3 or sum(param.numel() for param in engine.module.parameters()) < divided
            for _ in range(2):
                engine.backward((engine(rows) * rows).sum().div(16))
                engine.step()
            weights = weights_of(engine)
            if any((weights[key] != value).any() for key, value in plain.state_dict().items()):
                found.append(f"{name} at stage {stage}")
            engine.destroy()
    return found


@pytest.mark.parametrize(("size", "stages"), [(2, (0, 1, 2, 3)), (4, (1, 3))])
def test_layers_that_a_partition_config_names_are_divided_also_unevenly(size: int, stages: tuple[int, ...]) -> None:
    """Ten outputs over four ranks are 3, 3, 3 and 1, in DeepSpeed 3, 3, 2 and 2."""
    assert run_ranks(named_layers, size, stages) == [[]] * size


def refused_layers() -> list[str]:
    told = []
    pair = nn.Sequential(nn.Linear(10, 9), nn.Linear(9, 10))
    for model, more in ((nn.Linear(10, 10), {}), (pair, specs(_0="column", _1="row"))):
        with pytest.raises(PlanError) as caught:
            engine_of(model, 1, {"autotp_size": 2, **more})
        told.append(str(caught.value))
    return told


def test_refusals_of_layers_name_the_keys_of_the_configuration() -> None:
    """DeepSpeed 0.19.8 refuses the first too: "Not able to determine model policy automatically"."""
    for alone, uneven in run_ranks(refused_layers, 2):
        assert "found none in Linear; name them in tensor_parallel.partition_config.layer_specs, or use" in alone
        assert uneven.startswith("tensor_parallel.autotp_size=2: expected a divisor of the 9 columns of 0, found 2")


# ---- other ways to ask for it ----------------------------------------------------------------------------------------


def first_loss(model: nn.Module, **config: Any) -> tuple[float, int]:
    engine = engine_of(model, 1, **config)
    ids = torch.arange(6).view(1, -1)
    loss = engine(input_ids=ids, labels=ids).loss
    engine.backward(loss)
    engine.step()
    size = engine.autotp_size()
    engine.destroy()
    return loss.item(), size


def asked_in_other_ways() -> None:
    expected = first_loss(model_of("llama"))
    assert expected[1] == 2
    model = zero_runtime.tp_model_init(model_of("llama"), tp_size=2, dtype=torch.float32)
    with pytest.raises(PlanError, match=r"autotp_size: expected 2, as tp_model_init says, found 4"):
        first_loss(model, tensor={"autotp_size": 4})
    with pytest.raises(PlanError, match=r"bf16.enabled: expected the dtype of tp_model_init, torch.float32"):
        first_loss(model, tensor={}, bf16={"enabled": True})
    with pytest.raises(PlanError, match="expected one call for a model"):
        zero_runtime.tp_model_init(model, tp_size=1, dtype=torch.float32)
    with pytest.raises(PlanError, match="tp_group: expected none"):
        zero_runtime.tp_model_init(model, tp_size=2, dtype=torch.float32, tp_group=dist.group.WORLD)
    assert first_loss(model, tensor={}) == expected
    inside = adapted(zero_runtime.tp_model_init(model_of("llama"), 2, torch.float32), 2)
    assert first_loss(inside, tensor={})[1] == 2
    config = model_of("llama").config
    with zero_runtime.zero.Init():
        drawn = type(model)(config)
    assert first_loss(drawn)[1] == 2
    with pytest.raises(PlanError, match=r"mpu: expected none: tensor_parallel\.autotp_size makes groups"):
        initialize_quietly(model=model_of("llama"), config={"train_batch_size": 2}, mpu=object())


def test_a_size_of_tp_model_init_and_a_model_inside_of_init_are_divided_too() -> None:
    run_ranks(asked_in_other_ways, 2)


def test_the_loop_of_a_comparison_with_stage_3_learns(tmp_path: Path) -> None:
    """Its configuration says tp_size, which DeepSpeed 0.19.8 refuses beside autotp_size; the model here has two heads
    of keys, so the size is 2."""
    config = tmp_path / "config.json"
    config.write_text((SNIPPETS / "auto_tp.json").read_text().replace('"tp_size": 4', '"tp_size": 2'))
    first, second = run_ranks(run_script, 2, str(tmp_path), str(config), 30)
    told = [float(line.split("Loss: ")[1].split(",")[0]) for line in first["told"] if "Loss" in line]
    assert told[-1] < told[0] - 1
    assert first["steps"] == second["steps"]
    assert "a step here has train_batch_size / 2 sequences" in first["warned"][0]


# ---- weights, checkpoints, generation --------------------------------------------------------------------------------


def used(folder: Path, stage: int) -> None:
    plain_model = model_of("llama")
    model = copy.deepcopy(plain_model)
    engine = engine_of(model, stage)
    ids = torch.arange(6).view(1, -1)
    prompt = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(engine.generate(ids, **prompt), plain_model.generate(ids, **prompt))
    with pytest.raises(ParameterReadError, match="state_dict: expected whole parameters, found this rank's slices"):
        model.state_dict()  # a rank has slices
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    trained = weights_of(engine)
    state = engine.module_state_dict()
    assert all(torch.equal(state[name], value) for name, value in trained.items())
    engine.save_16bit_model(folder / "16bit")
    engine.save_checkpoint(folder / "saved", client_state={"epoch": 1})
    moment = engine.runtime.full_optimizer_state("lm_head.weight")["exp_avg"].clone()
    engine.destroy()
    with pytest.raises(ParameterReadError, match=r"embed_tokens\.weight.*only a part of its values"):
        model.state_dict()
    for tensor in (TWO, {}):
        again = engine_of(model_of("llama"), (stage + 1) % 4, tensor)
        assert again.load_checkpoint(folder / "saved")[1] == {"epoch": 1}
        assert again.global_steps == 1
        assert torch.equal(again.runtime.full_optimizer_state("lm_head.weight")["exp_avg"], moment)
        assert all(torch.equal(value, trained[name]) for name, value in weights_of(again).items())
        again.destroy()
    read = type(plain_model).from_pretrained(folder / "16bit").state_dict()
    assert all(torch.equal(read[name], value.bfloat16()) for name, value in trained.items())


@pytest.mark.parametrize("stage", [1, *(pytest.param(one, marks=pytest.mark.full) for one in (0, 2, 3))])
def test_weights_checkpoints_and_generation_are_those_of_the_whole_model(stage: int, tmp_path: Path) -> None:
    run_ranks(used, 2, tmp_path, stage)
