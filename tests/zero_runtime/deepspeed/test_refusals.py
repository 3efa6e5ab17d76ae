"""Invalid DeepSpeed configurations are refused with exact messages: what was expected, what was found, what to do."""

from __future__ import annotations

from typing import Any

import pytest

from zero_runtime.deepspeed.config import read_config
from zero_runtime.errors import PlanError

HIDDEN = 15  # odd: 0.9 of its square is not an integer


def config(**more: Any) -> dict[str, Any]:
    return {"train_batch_size": 8, "gradient_clipping": 0.0, **more}


def zero(level: int, **more: Any) -> dict[str, Any]:
    return config(zero_optimization={"stage": level, **more})


def problems(source: Any, world: int = 2) -> list[str]:
    with pytest.raises(PlanError) as caught:
        read_config(source, world)
    return str(caught.value).splitlines()[1:]


AUTO = "is filled in from TrainingArguments, and none that say it were given as args; "
TENSOR_PARALLEL = "tensor_parallel.tp_size: expected a divisor of the 2 ranks, found 4; the nearest is 2"

REFUSED: list[tuple[str, dict[str, Any], list[str]]] = [
    (
        "a mode of tags that DeepSpeed does not have",
        config(checkpoint={"tag_validation": "foo"}),
        [
            "checkpoint.tag_validation: expected 'Ignore' or 'ignore' or 'IGNORE' or 'Warn' or 'warn' or 'WARN' or "
            "'Fail' or 'fail' or 'FAIL', found 'foo': tags that differ between ranks are an error here in each of "
            "these modes"
        ],
    ),
    (
        "aio inside zero_optimization",
        zero(3, aio={"block_size": 1}),
        ["zero_optimization.aio: unknown key; it belongs at aio"],
    ),
    (
        "tp_size beside autotp_size",
        config(tensor_parallel={"tp_size": 1, "autotp_size": 1}),
        ["tensor_parallel: tp_size and autotp_size are two names of one number, found both; keep one"],
    ),
    ("tensor parallelism", config(tensor_parallel={"enabled": True, "tp_size": 4}), [TENSOR_PARALLEL]),
    (
        "sequence parallelism",
        config(sequence_parallel_size=2),
        [
            "sequence_parallel_size: found 2: sequence parallelism is on the command line alone (parallel.sp=2), where "
            "`zlab import` puts it: a script gives the model its part of a sequence, and here the model takes its part "
            "of whole ones; set it to 1, and use smaller micro-batches or recomputation"
        ],
    ),
    (
        "two sizes of tensor parallelism",
        config(tensor_parallel={"autotp_size": 2, "tp": {"tp_size": 4}}),
        [
            "tensor_parallel: expected one size, found [2, 4]; keep autotp_size",
            TENSOR_PARALLEL.replace("tp_size", "tp.tp_size"),
        ],
    ),
    ("tensor parallelism by default on", config(tensor_parallel={"tp_size": 4}), [TENSOR_PARALLEL]),
    (
        "fractional prefetch size",
        zero(3, stage3_prefetch_bucket_size=0.9 * HIDDEN * HIDDEN),
        ["zero_optimization.stage3_prefetch_bucket_size: expected a whole number, found 202.5"],
    ),
    (
        "auto left over",
        config(
            train_micro_batch_size_per_gpu="auto",
            fp16={"enabled": "auto"},
            optimizer={"type": "AdamW", "params": {"lr": "auto"}},
            zero_optimization={"reduce_bucket_size": "auto"},
        ),
        [
            f'train_micro_batch_size_per_gpu: "auto" {AUTO}write a whole number',
            f'fp16.enabled: "auto" {AUTO}write true or false',
            f'optimizer.params.lr: "auto" {AUTO}write a number',
        ],
    ),
    (
        "both fp16 and bf16",
        config(fp16={"enabled": True}, bf16={"enabled": True}),
        ["fp16.enabled, bf16.enabled: expected at most one of them, found both; disable one"],
    ),
    (
        "key with a digit for a letter",
        config(gradient_c1ipping=1.0),
        ["gradient_c1ipping: unknown key; did you mean gradient_clipping?"],
    ),
    (
        "unknown keys at every level, at once",
        config(
            optimizer={"type": "Adam", "adam_w_mode": True, "params": {"betas": [0.9, 0.9], "epss": 1}},
            fp16={"enabled": True, "loss_scal": 0},
            zero_optimization={"offload_param": {"devise": "none"}, "flops_profiler": {}},
            zzz=1,
        ),
        [
            "optimizer.adam_w_mode: unknown key",
            "fp16.loss_scal: unknown key; did you mean loss_scale?",
            "zero_optimization.offload_param.devise: unknown key; did you mean device?",
            "zero_optimization.flops_profiler: unknown key; it belongs at flops_profiler",
            "zzz: unknown key",
            "optimizer.params.epss: unknown key; did you mean eps?",
        ],
    ),
    (
        "batch triple",
        config(train_micro_batch_size_per_gpu=3, gradient_accumulation_steps=2),
        [
            "train_batch_size: expected 3 (train_micro_batch_size_per_gpu) x 2 (gradient_accumulation_steps) x 2 "
            "(ranks) = 12, found 8; set train_batch_size to 12, or leave one of the three out"
        ],
    ),
    (
        "batch that does not divide",
        config(gradient_accumulation_steps=3),
        [
            "train_batch_size: expected a multiple of 3 (gradient_accumulation_steps) x 2 (ranks) = 6, found 8; "
            "set it to 6 or 12"
        ],
    ),
    (
        "batch below one",
        config(train_micro_batch_size_per_gpu=0),
        ["train_micro_batch_size_per_gpu: expected at least 1, found 0"],
    ),
    ("not a number of a kind", config(gradient_clipping=True), ["gradient_clipping: expected a number, found True"]),
    (
        "negative clipping",
        config(gradient_clipping=-1),
        ["gradient_clipping: expected at least 0 (0 is none), found -1"],
    ),
    (
        "a level that is none",
        zero(4),
        ["zero_optimization.stage: expected 0, 1, 2 or 3, found 4"],
    ),
    (
        "a section that is no object",
        config(zero_optimization=3),
        ["zero_optimization: expected an object, found 3"],
    ),
    (
        "a section under its older and its newer name",
        config(bfloat16={"enabled": True}, bf16={"enabled": True}),
        ["bfloat16: expected it or bf16, which replaced it, found both; keep bf16"],
    ),
    (
        "auto batch sizes that nothing fills in: one line each",
        {"gradient_clipping": 0.0, "train_batch_size": "auto"},
        [f'train_batch_size: "auto" {AUTO}write a whole number'],
    ),
    (
        "tensor parallelism in a nested section",
        config(tensor_parallel={"tp": {"tp_size": 4}}),
        [TENSOR_PARALLEL.replace("tp_size", "tp.tp_size")],
    ),
    (
        "data types that contradict the precision",
        config(bf16={"enabled": True}, data_types={"param_dtype": "fp32", "buffer_dtype": "bf16"}),
        [
            "data_types.buffer_dtype: expected 'fp32', found 'bf16': buffers keep the model's dtype, or are fp32; cast "
            "them in the model",
            "data_types.param_dtype: expected bf16, which fp16 and bf16 say, found 'fp32'",
        ],
    ),
    (
        "compilation that is on",
        config(compile={"deepcompile": True}),
        [
            "compile: compilation by the engine (call torch.compile on your model) is not here; switch it off or "
            "leave it out"
        ],
    ),
    (
        "quantised messages where DeepSpeed ignores the keys",
        zero(2, zero_quantized_weights=True, zero_quantized_gradients=True),
        [
            "zero_optimization.zero_quantized_weights: needs stage 3, found stage 2, where DeepSpeed ignores it "
            "(zero.gather_dtype=int8 of the command line is the same at stages 1 and 2); set stage to 3, or leave it "
            "out",
            "zero_optimization.zero_quantized_gradients: needs stage 3, found stage 2, where DeepSpeed ignores it "
            "(zero.reduce_dtype=int4 of the command line is the same at stages 1 and 2); set stage to 3, or leave it "
            "out",
        ],
    ),
    (
        "quantised messages in groups",
        zero(3, mics_shard_size=2, zero_quantized_weights=True),
        [
            "zero_optimization.zero_quantized_weights: needs shards over all ranks, found mics_shard_size 2, with "
            "which DeepSpeed does not quantise gathers; leave one of them out"
        ],
    ),
    (
        "the parts of ZeRO++ that are not here",
        zero(
            3,
            zero_quantized_nontrainable_weights=True,
            zeropp_loco_param={"err_beta": 0.8, "reset_T": 1024},
        ),
        [
            "zero_optimization.zero_quantized_nontrainable_weights: expected False, found True: weights are stored in "
            "their own dtype; zero_quantized_weights quantises their gathers; set it to false",
            "zero_optimization.zeropp_loco_param: LoCo, whose errors fade and are dropped after some steps, is not "
            "here (zero.error_feedback=true of the command line keeps them); leave it out",
        ],
    ),
    (
        "a feature that is not here",
        config(elasticity={"enabled": True}),
        ["elasticity: elastic training is not here; switch it off or leave it out"],
    ),
    (
        "OneBitAdam where gradients are summed, and with clipping",
        zero(2, contiguous_gradients=True) | {"gradient_clipping": 1.0, "optimizer": {"type": "OneBitAdam"}},
        [
            "zero_optimization.stage: OneBitAdam needs stage 0 or 1, found stage 2, which sums gradients as they "
            "arrive (DeepSpeed had it at stage 0 alone); set it to 0 or 1",
            "gradient_clipping: OneBitAdam cannot clip here, found 1.0: after freeze_step gradients are not summed, "
            "so that their norm is not known (DeepSpeed then clipped each rank's own gradients by their own norm); "
            "set it to 0",
        ],
    ),
    (
        "OneBitAdam without a warm-up, and with other moments",
        config(optimizer={"type": "OneBitAdam", "params": {"freeze_step": 0, "amsgrad": True}}),
        [
            "optimizer.params.amsgrad: expected False, found True: 1-bit Adam has none",
            "optimizer.params: optimizer.warmup_updates must be at least 1, found 0",
        ],
    ),
    (
        "OneBitLamb",
        config(optimizer={"type": "OneBitLamb", "params": {"lr": 1e-3}}),
        [
            "optimizer.type: 'OneBitLamb': its ratios of compressed momenta are not here; the nearest are Lamb and "
            "OneBitAdam; expected Adam, AdamW, OneBitAdam, Lion, Lamb, Muon, SGD or another of torch.optim.ASGD, "
            "torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, "
            "torch.optim.RMSprop, torch.optim.Rprop"
        ],
    ),
    (
        "Muon by heads, beside Adam's decay",
        config(optimizer={"type": "Muon", "params": {"per_head_muon": True, "adam_w_mode": False, "ns_method": "x"}}),
        [
            "optimizer.params.per_head_muon: expected False, found True: whole matrices are orthogonalised here",
            "optimizer.params.adam_w_mode: expected True, found False: what is no matrix is updated by AdamW here",
            "optimizer.params.ns_method: expected 'gram' or 'standard', found 'x': DeepSpeed has two",
        ],
    ),
    (
        "max_grad_norm in the optimizer",
        config(optimizer={"type": "AdamW", "params": {"max_grad_norm": 1.0}}),
        ["optimizer.params.max_grad_norm: it belongs at the top level, as gradient_clipping"],
    ),
    (
        "betas outside their range",
        config(optimizer={"type": "AdamW", "params": {"betas": [1.5, 0.9]}}),
        ["optimizer.params: optimizer.beta1 must be from 0 to below 1, found 1.5"],
    ),
    (
        "a schedule without its length",
        config(scheduler={"type": "WarmupDecayLR", "params": {"warmup_num_steps": 3}}),
        ["scheduler.params: WarmupDecayLR needs total_num_steps"],
    ),
    (
        "a schedule that is not known",
        config(scheduler={"type": "StepLR"}),
        [
            "scheduler.type: expected one of LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR, found "
            "'StepLR'; any other schedule of torch may be handed to initialize as lr_scheduler"
        ],
    ),
    (
        "a dtype that is none",
        config(communication_data_type="fp8"),
        ["communication_data_type: expected one of bf16, fp16, fp32, found 'fp8'"],
    ),
    (
        "no batch at all",
        {"gradient_clipping": 1.0},
        ["train_batch_size: expected it or train_micro_batch_size_per_gpu, found neither; set one of them"],
    ),
]


@pytest.mark.parametrize(("source", "told"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_an_invalid_configuration_is_refused_with_the_exact_message(source: dict[str, Any], told: list[str]) -> None:
    assert [line.strip() for line in problems(source)] == told
