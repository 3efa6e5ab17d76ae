"""Describes one run in rows of text: its configuration before the run, its measurements after it. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from orchestrator import wings
from orchestrator.config.lossy import lossy_words
from orchestrator.config.schema import AdapterKind, CheckpointKind, DataKind, RunConfig, Tokenizer, to_dict
from orchestrator.config.state_groups import Offload
from orchestrator.report.progress import memory_text
from orchestrator.rounds import recorded
from orchestrator.rounds.intervals import of_rounds
from orchestrator.text.paths import program
from orchestrator.text.units import ABSENT, count, difference, digits, loss, many, percent, size, steps_text
from zero_runtime.offload_plan import Tier

PHASES = (
    ("forward", "forward"),
    ("backward", "backward"),
    ("communication_exposed", "exposed communication"),
    ("optimizer", "optimizer"),
    ("data", "data"),
)
MESSAGES = ("all_gather", "reduce_scatter", "all_reduce", "outer_all_gather", "outer_reduce_scatter")
UNSHOWN = (*MESSAGES, "reduced", "accumulated", "autocast")  # of `dtypes`: sent, or for a moment in the dtype of others
MOST_SIGNS = 200  # of a text of an example; the record has all of it
STATES = {"params": "parameters", "grads": "gradients", "optimizer": "optimizer"}


class Row(NamedTuple):
    """One line: a name and its value."""

    name: str
    text: str


class Table(NamedTuple):
    """Cells as text. The first `names` columns are left-aligned; the numbers after them are right-aligned.

    drops: columns in the order in which a narrow terminal leaves them out. kept: columns that it never leaves out.
    texts: columns of sentences, which are left-aligned and wrap.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    names: int = 1
    drops: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()


def plan_rows(config: RunConfig, folder: str) -> list[Row]:
    """The configuration of the run, with the batch size spelled out."""
    precision, batch, resources = config.precision.dtypes, config.batch, config.resources
    ranks = resources.ranks
    per_group = config.parallel.same_batch()
    sample = wings.load(wings.KINDS).sample_of(config)
    in_tokens = "" if sample.is_image else f"{batch.global_size} sequences x {batch.seq} tokens = "
    threads = f", {many(resources.threads, 'thread')} each" if resources.device.value == "cpu" else ""
    lossy = ", ".join(lossy_words(to_dict(config)))
    return [
        Row("model", _model_text(config)),
        Row("zero", f"stage {config.zero.stage}, prefetch {config.zero.prefetch}"),
        Row(
            "precision",
            f"parameters {precision.param}, gradients reduced in {precision.reduce}, "
            f"accumulated in {precision.accumulate}, master {precision.master}",
        ),
        *([Row("lossy", f"{lossy}; the loss differs from that of the exact run")] if lossy else []),
        *([] if config.offload == Offload() else [Row("offload", _offload_text(config.offload))]),
        Row("ranks", f"{ranks} x {resources.device}{threads}{_groups_text(config)}"),
        Row(
            "batch",
            f"micro {batch.micro} x accumulation {batch.accumulation} x ranks {ranks}{per_group} = "
            f"{in_tokens}{sample.amount(batch.global_size)}/step",
        ),
        Row("data", _data_text(config)),
        Row("steps", _steps_text(config)),
        Row("outputs", folder),
    ]


def _steps_text(config: RunConfig) -> str:
    measure, train = config.measure, config.train
    if measure.steps is not None:
        return f"{config.steps()} = {measure.warmup_steps} of warm-up + {measure.steps} measured"
    end = f"to step {train.max_steps}" if train.max_steps is not None else f"for {many_epochs(train.epochs or 0)}"
    when = f"every {train.eval_every} steps and at the end" if train.eval_every else "at the end"
    validated = "" if measure.validation_batches == 0 else f", validated {when}"
    saves = config.checkpoint.kind is not CheckpointKind.none
    kept = "" if saves else "; nothing is saved (checkpoint=sharded saves)"
    return f"training {end}{validated}{kept}"


def many_epochs(number: float) -> str:
    """A number of epochs, such as "1 epoch" or "2.5 epochs"."""
    text = f"{number:.3g}" if number < 100 else f"{number:,.0f}"
    return f"{text} epoch{'' if number == 1 else 's'}"


def _groups_text(config: RunConfig) -> str:
    parallel = config.parallel
    if parallel.group == 1:
        return ""
    held = "slices of each layer" if parallel.tp > 1 else "parts of each sequence"
    return f"; {parallel.group} consecutive ranks hold {held} and read the same batch"


def _model_text(config: RunConfig) -> str:
    model, adapter = config.model, config.adapter
    weights = (
        f"weights of {' + '.join(filter(None, (model.path, model.adapter)))}"
        if model.path
        else f"random weights, seed {config.seed}"
    )
    if adapter.kind is AdapterKind.none:
        return f"{model.name}, {weights}"
    targets = ", ".join(adapter.targets) or "all linear layers except the head"
    return f"{model.name}, {weights}; frozen, with LoRA of rank {adapter.rank} on {targets}"


def _offload_text(offload: Offload) -> str:
    what = {"optimizer states": offload.optimizer, "parameters": offload.params}
    places = {
        Tier.HOST: "host memory (on CPU ranks they are there already)",
        Tier.NVME: f"scratch files in {offload.folder}",
    }
    moved = {tier: " and ".join(name for name in what if what[name] is tier) for tier in places}
    moves = ", ".join(f"{names} in {places[tier]}" for tier, names in moved.items() if names)
    share = "" if offload.ratio == 1 else f"{offload.ratio:.0%} of the units: "
    return f"{share}{moves}"


def _data_text(config: RunConfig) -> str:
    kinds = {
        DataKind.stdlib: "stdlib: this Python's own standard-library sources",
        DataKind.synthetic: "synthetic: random tokens",
        DataKind.text: f"text: {config.data.path}",
        DataKind.pairs: f"pairs: prompts and responses of {config.data.path}, of which responses count in the loss",
    }
    bytewise = ", as bytes" if config.data.kind is not DataKind.synthetic else ""
    tokens = ", in tokens of the model's own tokenizer" if config.data.tokenizer is Tokenizer.model else bytewise
    return kinds[config.data.kind] + tokens


def ready_text(event: Mapping[str, Any]) -> str:
    """Facts that are known once the ranks have built the model and read the data."""
    known = event.get("predicted") or {}
    states, kept, peak = map(known.get, ("states", "activations_predicted_bytes", "peak_predicted_bytes"))
    predicted = f", model states predicted {size(_sum(states, 'predicted_bytes'))} a rank" if states else ""
    predicted += f", activations {size(kept)}" if kept is not None else ""
    predicted += f", peak {size(peak)}" if peak is not None else ""
    predicted += f", loaded: {memory_text(event)}" if event.get("memory_mib") is not None else ""
    return f"{count(event.get('parameters'))} parameters{predicted}, data hash {event.get('data_hash', ABSENT)}"


def _sum(states: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = [state.get(key) for state in states]
    return None if any(value is None for value in values) else float(sum(value or 0 for value in values))


def speed_rows(result: Mapping[str, Any]) -> list[Row]:
    """Throughput and step time, with their spread."""
    speed = result["throughput"]
    tokens, step = speed["tokens_per_second"], speed["step_ms"]
    counted = f"{speed['steps_counted']} steps counted, {speed['warmup_steps']} of warm-up not counted"
    return [
        Row(
            "tokens/s",
            f"{digits(tokens['median'])} median, p10-p90 {_range(tokens)}, {counted}; "
            f"{digits(speed['tokens_per_second_per_rank'])} a rank",
        ),
        *_rounds_rows(result),
        Row("step time", f"{digits(step['median'])} ms median, p10-p90 {_range(step)}"),
    ]


def _rounds_rows(result: Mapping[str, Any]) -> list[Row]:
    """The interval of the speed between rounds, if there are enough of them."""
    if not recorded.is_ranked(result):
        return []
    speeds = [1e3 / ms for ms in recorded.ms_per_token(result)]
    known = of_rounds(speeds)
    return [Row("rounds", f"{digits(known.low)}-{digits(known.high)} tokens/s, 95 % range of {len(speeds)} rounds")]


def phase_table(result: Mapping[str, Any]) -> Table:
    """Time of a step by phase."""
    phases = result["phases_ms"]
    total = sum(phases[key] or 0 for key, _ in PHASES)
    times = tuple(digits(phases[key]) for key, _ in PHASES)
    shares = tuple(percent(phases[key] or 0, total) for key, _ in PHASES)
    header = ("step time by phase", *(name for _, name in PHASES))
    return Table(header, (("ms", *times), ("share", *shares)))


def _range(spread: Mapping[str, float]) -> str:
    return f"{digits(spread['p10'])}-{digits(spread['p90'])}"


def memory_table(result: Mapping[str, Any]) -> Table:
    """A rank's memory by component: predicted and measured for model states, measured only for most of the rest."""
    memory = result["memory"]
    rows = []
    for state in memory["states"]:
        name = STATES.get(state["component"], state["component"])
        rows.append(_memory_row(name, state["measured_bytes"], state["predicted_bytes"]))
    measured, predicted = _sum(memory["states"], "measured_bytes"), _sum(memory["states"], "predicted_bytes")
    rows.append(_memory_row(f"model states: {memory['formula']}", measured, predicted))
    if memory.get("padding_bytes"):
        rows.append(_memory_row("  of which padding", memory["padding_bytes"], None))
    if memory.get("scratch_bytes"):
        foreseen = memory.get("scratch_predicted_bytes")
        rows.append(_memory_row("  in the scratch file", memory["scratch_bytes"], foreseen))
    host = memory.get("host") or {}
    if host.get("predicted_bytes"):
        rows.append(_memory_row("offload: host memory", host["measured_bytes"], host["predicted_bytes"]))
    rows.append(_memory_row("activations", memory["activations_bytes"], memory.get("activations_predicted_bytes")))
    if memory.get("activations_host_bytes"):
        rows.append(_memory_row("  offloaded to host memory", memory["activations_host_bytes"], None))
    rows.append(_memory_row("other tensors", memory["other_tensors_bytes"], None))
    allocated, expected = memory.get("peak_allocated_bytes"), memory.get("peak_predicted_bytes")
    if allocated is not None or expected is not None:
        rows.append(_memory_row("peak allocated", allocated, expected))
    for key, name in (("peak_reserved_bytes", "peak reserved"), ("peak_rss_bytes", "peak RSS of the process")):
        if memory.get(key) is not None:
            rows.append(_memory_row(name, memory[key], None))
    if memory.get("activations_unknown"):
        rows.append((f"activations cannot be predicted: {memory['activations_unknown']}", "", "", ""))
    header = ("memory, largest over ranks", "predicted", "measured", "difference")
    return Table(header, tuple(rows))


def _memory_row(name: str, measured: float | None, predicted: float | None) -> tuple[str, ...]:
    return name, size(predicted), size(measured), difference(measured, predicted)


def dtype_rows(result: Mapping[str, Any]) -> list[Row]:
    """The dtypes of what was compared with the configuration; empty for an evaluation, which compares none."""
    found = result.get("dtypes") or {}
    if not found:
        return []
    kept = [f"{name} {' and '.join(found[name])}" for name in found if name not in UNSHOWN]
    sent = dict.fromkeys(dtype for name in MESSAGES for dtype in found.get(name, {}))
    # The ranks of another engine have counted them, and a comparison judges them.
    said = "as configured: " if (result.get("engine") or {}).get("kind", "zero") == "zero" else ""
    return [Row("dtypes", said + ", ".join([*kept, *([f"sent {' and '.join(sent)}"] if sent else [])]))]


def communication_rows(result: Mapping[str, Any]) -> list[Row]:
    """Bytes of a steady step by collective, which are those that a ring must send, and their elements in theory."""
    talk = result["communication"]
    used = {name: volume for name, volume in talk["data"].items() if volume["calls"]}
    total = sum(volume["elements"] for volume in used.values())
    parts = [f"{name} {volume['calls']} calls {size(volume['bytes'])}" for name, volume in used.items()]
    sent = f"{size(sum(volume['bytes'] for volume in used.values()))} a rank and step: {', '.join(parts) or 'none'}"
    if talk.get("theory") is None:
        return [Row("communication", sent)]
    theory, padding = talk["theory_elements"], talk.get("padding_elements") or 0
    holds = "equal" if total == theory + padding else "NOT equal"
    return [
        Row("communication", sent),
        Row(
            "  and in theory",
            f"{total:,.0f} elements sent; {talk['theory']} = {theory:,.0f} + padding {padding:,.0f}: {holds}",
        ),
    ]


def learning_rows(result: Mapping[str, Any]) -> list[Row]:
    """Loss and data set."""
    losses, data = result["loss"], result["data"]
    missing = f"; {missing_text(losses['missing_steps'])}" if losses.get("missing_steps") else ""
    if losses.get("tokens") is not None:
        return [_evaluated(losses), _data_row(data)]
    validation = f", validation {loss(losses['validation'])}" if losses.get("validation") is not None else ""
    return [
        Row(
            "loss",
            f"{loss(losses['first'])} first, {loss(losses['last'])} last ({result['steps']} steps)"
            f"{validation}{missing}",
        ),
        _data_row(data),
    ]


def training_rows(result: Mapping[str, Any]) -> list[Row]:
    """How far a training to an end came, its best validation, and the examples; empty for another run."""
    training = result.get("training")
    if training is None:
        return []
    rows = [
        Row(
            "trained",
            f"{result['steps']:,} steps, {many_epochs(training['epochs'])}, {training['tokens']:,} tokens, of which "
            f"{training['learned_tokens']:,} count in the loss",
        )
    ]
    if best := training.get("best"):
        kept = f": {best['checkpoint']}" if best.get("checkpoint") else ""
        rows.append(Row("best", f"validation {loss(best['loss'])} after step {best['step']:,}{kept}"))
    for one in training["examples"]:
        prompt, answer, reference = (shown_tokens(one[part]) for part in ("prompt", "answer", "reference"))
        end = prompt if len(prompt) <= MOST_SIGNS else f"...{prompt[-MOST_SIGNS:]}"
        cut = [text if len(text) <= MOST_SIGNS else f"{text[:MOST_SIGNS]}..." for text in (answer, reference)]
        rows += [Row("example", end), Row("  continued", cut[0]), Row("  in the data", cut[1])]
    return rows


def shown_tokens(part: Mapping[str, Any]) -> str:
    """The text of an example as a Python literal, so that it is one line; its token ids if it is no text."""
    return str(part["ids"]) if part.get("text") is None else repr(part["text"])


def _evaluated(losses: Mapping[str, Any]) -> Row:
    exact = losses.get("perplexity")
    perplexity = "too large for a number" if exact is None else f"{exact:.4f}"
    return Row("loss", f"{loss(losses['last'])}, perplexity {perplexity} over {losses['tokens']:,} held-out tokens")


def _data_row(data: Mapping[str, Any]) -> Row:
    return Row(
        "data",
        f"{data['name']}, hash {data['hash']}, {count(data['train_samples'])} training and "
        f"{count(data['validation_samples'])} validation sequences",
    )


def missing_text(missing_steps: Sequence[Sequence[int]]) -> str:
    """The steps that the learning curve of a resumed run lacks."""
    return f"the losses of {steps_text(missing_steps)} are missing from the record of the earlier attempt"


def resumed_text(event: Mapping[str, Any]) -> str:
    """The checkpoint and step from which a run resumes."""
    if "kind" not in event:
        missing = event.get("missing_steps")
        without = f"; {missing_text(missing)} ({event.get('metrics')})" if missing else ""
        return f"resumed after step {event['step']} from {event['path']}{without}"
    return f"loaded {event['path']}: {event['kind']}, {event['updates']} updates; steps and schedule start at 0"


def checkpoint_rows(result: Mapping[str, Any]) -> list[Row]:
    """The saved checkpoints and their cost; empty if none were saved."""
    facts = result.get("checkpoints") or {}
    rows = []
    if facts.get("resumed_from_step"):
        rows.append(Row("resumed", f"after step {facts['resumed_from_step']}; speed is of the steps since"))
    if facts.get("saved"):
        stall = facts["stall_ms"]
        cost = "" if stall is None else f", each blocked training for {digits(stall)} ms (median)"
        rows.append(Row("checkpoints", f"{facts['saved']} saved in {facts['folder']}{cost}"))
    if facts.get("measured_by"):
        text = f"by {facts['measured_by']}, which made and saved every step; checkpoint.resume=none measures again"
        rows.append(Row("measured", text))
    if facts.get("weights"):
        rows.append(Row("weights", f"{facts['weights']}: a Hugging Face folder"))
    return rows


def machine_row(result: Mapping[str, Any]) -> Row:
    """The machine on which the numbers were measured."""
    environment = result.get("environment", {})
    chip = environment.get("gpu") or environment.get("cpu") or "unknown machine"
    warning = "; a CPU's speed says nothing about GPUs" if result["device"] == "cpu" else ""
    versions = f"torch {environment.get('torch', ABSENT)}, python {environment.get('python', ABSENT)}"
    over = " because ".join(filter(None, (result["backend"], result.get("backend_reason"))))
    return Row("measured on", f"{result['world']} x {result['device']}, {chip}, {over}, {versions}{warning}")


def without_key(overrides: Sequence[str], *keys: str) -> list[str]:
    """The overrides without those that set one of these keys."""
    return [override for override in overrides if override.lstrip("+~").partition("=")[0] not in keys]


def changed_command(overrides: Sequence[str], changes: str) -> str:
    """The command that runs one point with other settings: overrides that the changes replace are left out."""
    words = changes.split()
    groups = [word.partition("=")[0] for word in words]
    replaced = [f"{group}{key}" for group in groups for key in ("", ".stage", ".kind")]
    return run_command([*without_key(overrides, *replaced), *words])


def run_command(overrides: Sequence[str]) -> str:
    """The command that runs one point."""
    return " ".join([program(), shlex.join(without_key(overrides, "sweeps"))]).strip()
