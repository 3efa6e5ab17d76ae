"""Python lines for a user's own loop: parameter groups and learning rates in plain torch.

They import nothing of this project, so that the exported files run where only torch is installed.
"""

from __future__ import annotations

from orchestrator.config.schema import RunConfig
from zero_runtime.optim.configs import AdamConfig, AdamWConfig, SgdConfig, TorchConfig

_GROUPS = '''
def parameter_groups(model):
    """Weight decay for matrices{all}."""
    trained = [param for param in model.parameters() if param.requires_grad]
    {body}
'''
_SPLIT = """decayed = [param for param in trained if param.dim() > 1]
    others = [param for param in trained if param.dim() <= 1]
    groups = [{{"params": decayed, "weight_decay": {decay!r}}}, {{"params": others, "weight_decay": 0.0}}]
    return [group for group in groups if group["params"]]"""
_ONE = 'return [{{"params": trained, "weight_decay": {decay!r}}}]'
_RATES = '''
# The learning rate of each optimizer update of the point, as a share of {lr!r}.
SHARES = {shares}


def schedule(optimizer):
    """Step it after each update; later updates keep the last rate."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: SHARES[min(update, len(SHARES) - 1)])
'''


def parameter_groups(config: RunConfig) -> str:
    """The function parameter_groups(model), which leaves norms and biases out of weight decay if the point does."""
    rule = config.optimizer.rule
    body = _SPLIT if rule.no_decay else _ONE
    told = ", none for norms and biases" if rule.no_decay else " and vectors"
    return _GROUPS.format(all=told, body=body.format(decay=float(rule.decay)))


def rates(config: RunConfig) -> str:
    """The function schedule(optimizer), with the rates of every update of the point."""
    total = config.steps() or 1
    lr = config.optimizer.lr
    schedule = config.scheduler.curve.build(lr, total)
    shares = [_rate(schedule.rates(update).lr) / lr if lr else 0.0 for update in range(total)]
    return _RATES.format(lr=lr, shares=_wrapped(shares))


def optimizer_line(config: RunConfig) -> str:
    """The call of torch.optim that makes the point's optimizer; empty if torch has none."""
    rule, lr = config.optimizer.rule, config.optimizer.lr
    if isinstance(rule, AdamWConfig) and rule.kind in ("adam", "adamw"):
        kind = "Adam" if isinstance(rule, AdamConfig) else "AdamW"
        given = f"lr={lr!r}, betas=({rule.beta1!r}, {rule.beta2!r}), eps={rule.eps!r}"
        return f"torch.optim.{kind}(parameter_groups(model), {given})"
    if isinstance(rule, SgdConfig):
        given = f"lr={lr!r}, momentum={rule.momentum!r}, dampening={rule.dampening!r}, nesterov={rule.nesterov!r}"
        return f"torch.optim.SGD(parameter_groups(model), {given})"
    if isinstance(rule, TorchConfig):
        given = ", ".join([f"lr={lr!r}", *(f"{key}={value!r}" for key, value in rule.arguments.items())])
        return f"torch.optim.{rule.class_name}(parameter_groups(model), {given})"
    return ""


def _rate(lr: float | tuple[float, ...]) -> float:
    assert isinstance(lr, float)
    return lr


def _wrapped(shares: list[float]) -> str:
    rows = [", ".join(f"{share:.10g}" for share in shares[start : start + 8]) for start in range(0, len(shares), 8)]
    return "[\n" + "".join(f"    {row},\n" for row in rows) + "]"
