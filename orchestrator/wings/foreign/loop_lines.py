"""Python lines for a user's own loop in plain torch: parameter groups, the optimizer, learning rates and a step.

They import nothing of this project, so that the exported files run where only torch is installed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import indent, wrap
from typing import Any

from orchestrator.config.schema import RunConfig
from orchestrator.config.strict import Refusal
from orchestrator.wings.engines.optimizer_words import optimizer_words

TORCH_DTYPES = {"fp32": "torch.float32", "bf16": "torch.bfloat16", "fp16": "torch.float16"}
_OF_STEP = "import torch.distributed as dist\nimport torch.nn.functional as F\n"
_GROUPS = '''
def parameter_groups(model):
    """Weight decay for matrices{all}."""
    decayed, others = [], []
    for name, param in model.named_parameters():
        if param.requires_grad:
            {body}
    groups = [{{"params": decayed, "weight_decay": {decay!r}}}, {{"params": others, "weight_decay": 0.0}}]
    return [group for group in groups if group["params"]]
'''
_SPLIT = """owner, _, own = name.rpartition(".")
            words = owner.rpartition(".")[2].split("_")
            norm = any(re.match(r"^(ln|\\w*norm)\\d*$", word, re.IGNORECASE) for word in words)
            (others if param.dim() <= 1 or own == "bias" or norm else decayed).append(param)"""
_RATES = '''
# The learning rate of each update of the point.
RATES = {rates}


class Rates(torch.optim.lr_scheduler.LRScheduler):
    def get_lr(self):
        return [RATES[min(self.last_epoch, len(RATES) - 1)] for _ in self.optimizer.param_groups]


def schedule(optimizer):
    """Step it after each update; later updates keep the last rate."""
    return Rates(optimizer)
'''
_STEP = '''
def loss_of(model, input_ids, labels):
    """The sum of the losses of the tokens; labels[b, t] follows input_ids[b, t], and a label of -100 does not count."""
    logits = model(input_ids=input_ids, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten(), ignore_index=-100, reduction="sum")


def train_step({arguments}, micro_batches, loss_of=loss_of):
    """One update from this rank's micro-batches, ACCUMULATION pairs (input_ids, labels). Returns the mean loss of the
    tokens of all ranks."""
    tokens = sum((labels != -100).sum() for _, labels in micro_batches)
    dist.all_reduce(tokens)
    total = torch.zeros((), dtype=torch.float64, device=tokens.device)
    for index, (input_ids, labels) in enumerate(micro_batches):
{micro}
        total += loss.detach()
{update}
    dist.all_reduce(total)
    return total.item()
'''
_UPDATE = """if CLIP_NORM is not None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM, foreach=True)
optimizer.step()
optimizer.zero_grad()"""


def file(
    config: RunConfig, why: str, notes: Sequence[str], *, call: str, imports: str, wrapper: str, micro: str
) -> str:
    """A file in plain torch. call: the name of the function `wrapper`, which the user calls first; see `heading` and
    `step` for the others."""
    use = (
        f"In every rank call {call}(model), then optimizer(model) and schedule(optimizer). train_step is an update;\n"
        "step the schedule after it. Needs torch alone."
    )
    first = heading(why, notes, use) + "\n" + needed(config) + imports
    lines = (wrapper, parameter_groups(config), optimizer(config), rates(config), step(micro))
    return "\n".join([first, sizes(config), *lines])


def needed(config: RunConfig, *, steps: bool = True, more: str = "") -> str:
    """The imports of the lines below. steps: those of `step` are among them. more: of Python's own modules."""
    own = ("import re\n" if config.optimizer.rule.no_decay else "") + more
    return (f"{own}\n" if own else "") + "import torch\n" + (_OF_STEP if steps else "")


def heading(why: str, notes: Sequence[str], use: str) -> str:
    """The docstring of a file. why: its first line. notes: what the file does otherwise than the run that it is of."""
    told = [line for note in notes for line in wrap(note, 116, initial_indent="- ", subsequent_indent="  ")]
    return "\n".join(['"""' + why, "", use, *(["", "Notes:", *told] if told else []), '"""', ""])


def refuse_loss_scale(config: RunConfig) -> None:
    """Refusal: the point scales its loss."""
    if config.precision.scales_loss:
        raise Refusal(["the written loop has no loss scale, found precision=fp16      fix: precision=bf16"])


def model_notes(config: RunConfig, before: str) -> list[str]:
    """What the user's script does with the model before a call of `before`, one sentence each."""
    notes = []
    if config.recompute.kind != "none":
        call = "call model.gradient_checkpointing_enable() in your script"
        notes.append(f"recompute={config.recompute.kind}: {call}, before {before}")
    if config.adapter.kind.value != "none":
        notes.append(f"adapter=lora: wrap the model with peft before {before}")
    return notes


def sizes(config: RunConfig) -> str:
    """The line of the constants that train_step reads."""
    found = f"{config.batch.micro}, {config.batch.accumulation}, {config.optimizer.clip_norm!r}"
    return f"MICRO_BATCH, ACCUMULATION, CLIP_NORM = {found}\n"


def parameter_groups(config: RunConfig) -> str:
    """The function parameter_groups(model), which leaves norms and biases out of weight decay if the point does."""
    rule = config.optimizer.rule
    body = _SPLIT if rule.no_decay else "decayed.append(param)"
    told = ", none for norms and biases" if rule.no_decay else " and vectors"
    return _GROUPS.format(all=told, body=body, decay=float(rule.decay))


def optimizer(config: RunConfig) -> str:
    """The function optimizer(model)."""
    name, arguments = optimizer_words(config)
    given = f"parameter_groups(model), {call_arguments(arguments)}"
    return f"\ndef optimizer(model):\n    return torch.optim.{name}({given})\n"


def call_arguments(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


def rates(config: RunConfig) -> str:
    """The function schedule(optimizer), with the rates of every update of the point."""
    total = config.steps() or 1
    schedule = config.scheduler.curve.build(config.optimizer.lr, total)
    return _RATES.format(rates=_wrapped([_rate(schedule.rates(update).lr) for update in range(total)]))


def step(micro: str, *, arguments: str = "model, optimizer", update: str = _UPDATE) -> str:
    """The functions loss_of and train_step. micro: lines that compute `loss` of (input_ids, labels), of which `index`
    is the number, and its gradients. update: lines after the last one."""
    return _STEP.format(arguments=arguments, micro=indent(micro, " " * 8), update=indent(update, " " * 4))


def _rate(lr: float | tuple[float, ...]) -> float:
    assert isinstance(lr, float)
    return lr


def _wrapped(numbers: Sequence[float]) -> str:
    rows = [", ".join(map(repr, numbers[start : start + 6])) for start in range(0, len(numbers), 6)]
    return "[\n" + "".join(f"    {row},\n" for row in rows) + "]"
