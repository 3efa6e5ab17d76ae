from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from points import make_config
from rich.console import Console
from stub_worker import make_result, step_event

from orchestrator.config.schema import Measure, Train, to_dict
from orchestrator.records.record_shapes import RESULT, misfit
from orchestrator.report import ranking, trained
from orchestrator.report.entry import Entry
from orchestrator.report.progress import progress
from orchestrator.report.screen import Screen, make_console
from orchestrator.report.summary import Row, Table

CONFIG = make_config(Path("outputs"))


def show(*, terminal: bool = False, width: int = 200) -> tuple[Screen, io.StringIO]:
    out = io.StringIO()
    return Screen(Console(file=out, width=width, force_terminal=terminal, color_system=None)), out


def squeezed(out: io.StringIO) -> str:
    return re.sub(r" +", " ", out.getvalue())


def summary_of(result: dict[str, Any]) -> str:
    screen, out = show()
    screen.success(result, "", {})
    return squeezed(out)


def test_the_plan_shows_how_the_batch_size_is_computed() -> None:
    screen, out = show()
    screen.plan("stage2-bf16", CONFIG, "outputs/x")
    assert ("micro 4 x accumulation 2 x ranks 2 = 16 sequences x 128 tokens = 2,048 tokens/step") in out.getvalue()
    assert "6 = 2 of warm-up + 4 measured" in out.getvalue()


def test_the_summary_says_which_steps_were_counted_and_which_were_left_out() -> None:
    text = summary_of(make_result(CONFIG))
    assert "9,412 median, p10-p90 9,224-9,506, 4 steps counted, 2 of warm-up not counted" in text
    for phase in ("forward", "backward", "exposed communication", "optimizer", "data"):
        assert phase in text


def test_the_predicted_peak_is_shown_beside_the_allocators_and_records_from_before_it_are_readable() -> None:
    result = make_result(CONFIG)
    result["memory"] |= {"peak_predicted_bytes": 100 << 20}
    assert "peak allocated 100 MiB - -" in summary_of(result)
    result["memory"] |= {"peak_allocated_bytes": 101 << 20}
    assert "peak allocated 100 MiB 101 MiB +1.0 %" in summary_of(result)
    del result["memory"]["peak_predicted_bytes"]
    result["memory"] |= {"floor_predicted_bytes": 90 << 20}
    assert "peak allocated - 101 MiB -" in summary_of(result)


def test_predicted_and_measured_states_are_shown_together_in_powers_of_1024() -> None:
    text = summary_of(make_result(CONFIG))
    assert "parameters 2.29 MiB 2.29 MiB exact" in text
    assert "gradients 1.14 MiB 1.24 MiB +8.3 %" in text
    assert "model states: 2Ψ + 16Ψ/N 10.3 MiB 10.4 MiB +0.9 %" in text


def test_the_summary_shows_predicted_and_measured_scratch_bytes_and_warns_of_a_busy_machine() -> None:
    result = make_result(CONFIG)
    assert "warning" not in summary_of(result)
    result["memory"] |= {"scratch_bytes": 3 << 20, "scratch_predicted_bytes": 3 << 20}
    result["load"] = {"others_share": 0.48}
    text = summary_of(result)
    assert "in the scratch file 3.00 MiB 3.00 MiB exact" in text
    assert "warning: other processes took 48 % of the cores while this was measured" in text


def test_communication_is_called_equal_to_the_theory_only_when_it_is() -> None:
    result = make_result(CONFIG)
    assert "1,200,000 elements sent; 2Ψ·(N-1)/N = 1,199,800 + padding 200: equal" in summary_of(result)
    assert "control messages" not in summary_of(result), "they are in the record"
    result["communication"]["theory_elements"] -= 1
    assert "NOT equal" in summary_of(result)


def test_output_without_a_terminal_has_complete_lines_and_no_control_characters() -> None:
    screen, out = show(width=60)
    screen.begin(CONFIG)
    screen.event({"event": "ready", "parameters": 1_200_000, "data_hash": "c0ffee", "predicted": None})
    for step in range(1, 7):
        screen.event(step_event(step, 2))
    screen.end()
    screen.success(make_result(CONFIG), "", {})
    assert "\x1b" not in out.getvalue()
    assert "\r" not in out.getvalue()
    assert "warm-up step 1/6" in out.getvalue()
    assert "measuring step 6/6  loss 5.9400  9,406 tokens/s  rss 512 MiB\n" in out.getvalue()


def test_on_a_terminal_the_bar_shows_step_loss_speed_and_memory() -> None:
    screen, out = show(terminal=True)
    screen.begin(CONFIG)
    screen.event(step_event(6, 2))
    screen.end()
    assert "6/6 loss 5.9400 9,406 tokens/s rss 512 MiB" in squeezed(out)


def test_a_table_in_a_pipe_has_its_full_width_unless_columns_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    row = tuple(f"a long cell with number {number}" for number in range(12))
    for columns, shown in (("60", 2), ("", 12), ("many", 12)):
        monkeypatch.setenv("COLUMNS", columns)
        monkeypatch.setattr("sys.stdout", out := io.StringIO())
        Screen(make_console()).table(Table(row, (row,)))
        lines = [line.rstrip() for line in out.getvalue().splitlines()]
        assert [line.split("  ") for line in lines[:2]] == [list(row[:shown])] * 2
        assert (len(lines) > 2) is (shown < 12)  # what was left out is said


def test_steps_before_a_resume_are_not_shown_as_steps_of_the_resumed_run() -> None:
    screen, out = show()
    screen.begin(CONFIG)
    screen.event({**step_event(1, 2), "earlier": True})
    screen.event({"event": "resumed", "step": 1, "path": "step-1"})
    screen.event(step_event(2, 2))
    screen.end()
    assert "step 1/6" not in out.getvalue()
    assert out.getvalue().index("resumed after step 1") < out.getvalue().index("warm-up step 2/6")


def test_a_training_shows_its_steps_its_validations_and_what_was_lowest_so_far() -> None:
    screen, out = show()
    config = replace(CONFIG, measure=Measure(warmup_steps=2, steps=None), train=Train(epochs=1.5, eval_every=50))
    screen.plan("a", config, "here")
    screen.begin(config)
    screen.event({"event": "validation", "step": 50, "loss": 4.5, "best": True, "earlier": True})
    screen.event({**step_event(51, 2), "of": 300})
    screen.event({"event": "validation", "step": 100, "loss": 3.25, "best": True})
    screen.event({"event": "validation", "step": 150, "loss": 3.5, "best": False})
    screen.end()
    text = out.getvalue()
    assert "training for 1.5 epochs, validated every 50 steps and at the end; nothing is saved" in text
    assert "training step 51/300" in text
    assert "step 50\n" not in text
    assert "step 50," not in text
    assert "validation loss 3.2500 at step 100, the lowest so far\n" in text
    assert "validation loss 3.5000 at step 150\n" in text


def trained_result() -> dict[str, Any]:
    result = make_result(CONFIG)
    example = {name: {"ids": [1, 2], "text": f"{name}\n"} for name in ("prompt", "answer", "reference")}
    best = {"step": 200, "loss": 3.0, "checkpoint": "/c/step-00000200"}
    told = {
        "epochs": 1.5,
        "tokens": 30720,
        "learned_tokens": 9000,
        "validations": 3,
        "last_checkpoint": "/c/step-00000300",
    }
    return {**result, "steps": 300, "training": {**told, "best": best, "examples": [example]}}


def test_the_summary_of_a_training_has_its_length_its_best_validation_and_its_examples() -> None:
    assert misfit(trained_result(), RESULT) is None
    text = summary_of(trained_result())
    assert "300 steps, 1.5 epochs, 30,720 tokens, of which 9,000 count in the loss" in text
    assert "validation 3.0000 after step 200: /c/step-00000200" in text
    assert "'prompt\\n'" in text
    assert "'answer\\n'" in text
    assert "'reference\\n'" in text
    ids = {"ids": [1, 2], "text": None}
    result = trained_result()
    result["training"]["examples"] = [dict.fromkeys(("prompt", "answer", "reference"), ids)]
    assert "[1, 2]" in summary_of(result)
    long = {"ids": [1, 2], "text": "first" + "x" * 999 + "last"}
    result["training"]["examples"] = [dict.fromkeys(("prompt", "answer", "reference"), long)]
    first, last = f"'first{'x' * 194}...", f"...{'x' * 195}last'"
    assert f"example {last} continued {first} in the data {first}" in " ".join(summary_of(result).split())


def test_a_training_ends_with_one_line_and_the_commands_that_use_the_best_checkpoint() -> None:
    config = to_dict(replace(CONFIG, measure=Measure(warmup_steps=2, steps=None), train=Train(max_steps=300)))
    typed = ["measure=train", "train.max_steps=300", "checkpoint=sharded"]
    rows = trained.closing_rows(typed, config, trained_result())
    assert [row.name for row in rows] == ["done", "next", "", "go on"]
    done, export, generate, on = (row.text for row in rows)
    assert done.endswith("best 3.0000 after step 200: /c/step-00000200")
    assert export.endswith("export-weights /c/step-00000200 /weights-step-00000200")
    assert generate.endswith("generate model.path=/weights-step-00000200 prompt=Once")
    assert on.endswith("measure=train checkpoint=sharded train.max_steps=600 checkpoint.resume=/c/step-00000300")
    pairs = {**config, "data": {**config["data"], "kind": "pairs"}}
    assert trained.next_commands(typed, pairs, trained_result())[1].endswith("ask=Once")
    result = trained_result()
    result["training"] |= {"last_checkpoint": None, "best": {"step": 300, "loss": 3.0, "checkpoint": None}}
    done, saves = (row.text for row in trained.closing_rows(typed[:2], config, result))
    assert done.endswith("nothing was saved (checkpoint=none)")
    assert saves.endswith("measure=train train.max_steps=300 checkpoint=sharded")


def test_rounds_that_are_measured_again_are_announced() -> None:
    screen, out = show()
    screen.begin(CONFIG)
    screen.event({"event": "repeating", "rounds": [2, 5]})
    screen.end()
    assert "measuring again, because other processes took a notable share of the cores: round 2, 5" in out.getvalue()


def test_further_rounds_are_announced() -> None:
    screen, out = show()
    screen.begin(CONFIG)
    screen.event({"event": "extending", "rounds": [7, 8, 9]})
    screen.end()
    assert "measuring 3 further rounds, as measure.min_s asks" in out.getvalue()


def test_a_command_to_copy_stays_on_one_line_on_a_narrow_terminal() -> None:
    screen, out = show(terminal=True, width=60)
    command = "python run.py -m zero=stage0,stage1,stage2,stage3 model.config.n_layer=3 --output a/folder/elsewhere"
    screen.closing([Row("next", command), Row("dashboard", "make ui")])
    assert f"{command}\n" in out.getvalue()


def test_square_brackets_in_a_message_are_printed_unchanged() -> None:
    screen, out = show(terminal=True)
    screen.failure("a", "error", "rank 1: KeyError: [bold]", ["x[/red]"], "rank1.log")
    assert "KeyError: [bold]" in out.getvalue()
    assert "x[/red]" in out.getvalue()


def test_the_comparison_prints_its_rule_its_ties_and_the_reason_of_a_failure() -> None:
    screen, out = show()
    good = [Entry(label, "ok", make_result(CONFIG, speed)) for label, speed in (("a", 100.0), ("b", 99.5))]
    for entry, ms in zip(good, (100.0, 100.5), strict=True):
        assert entry.result is not None
        entry.result["rounds"] = [{"number": number, "began": 0.0, "step_ms": [ms + number % 2]} for number in range(3)]
    old = Entry("old", "cached", make_result(CONFIG, 10.0), measured_at=0.0)
    screen.comparison(ranking.rank([*good, old, Entry("c", "error", None, "rank 1 was killed")]))
    text = squeezed(out)
    assert "1 of 3 rows was measured earlier: old measured " in text
    assert ranking.rule(ranking.DEFAULT_METRIC) in text
    assert "= 1 b" in text
    assert "c: error: rank 1 was killed" in text


@pytest.mark.parametrize("name", ["NO_COLOR", "TERM"])
def test_no_colour_is_printed_if_the_environment_disables_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "dumb" if name == "TERM" else "1")
    out = io.StringIO()
    Screen(Console(file=out, force_terminal=True)).warn("careful")
    assert out.getvalue() == "warning: careful\n" or "\x1b[3" not in out.getvalue()


def test_a_sweep_of_trainings_is_ranked_by_what_they_learned_and_followed_by_weights() -> None:
    config = to_dict(replace(CONFIG, measure=Measure(warmup_steps=2, steps=None), train=Train(max_steps=300)))
    entries = [
        Entry(label, "ok", {**trained_result(), "rounds": []}, overrides=("measure=train",), config=config)
        for label in "ab"
    ]
    rows = ranking.rank(entries)
    assert ranking.conclusion(rows).endswith("a training has one: rank_by loss_validation")
    assert "export-weights /c/step-00000200" in ranking.next_after_sweep(rows)
    compared = ranking.table(rows)
    assert (compared.header[-1], compared.rows[0][-1]) == ("loss held out", "5.3000")
    step = {**step_event(51, 2), "of": 300}
    assert progress([step], config).words == "training 51/300"
    validation = {"event": "validation", "step": 50, "loss": 3.0}
    assert progress([step, validation], config).words == "training 51/300"
    assert progress([{**step, "step": 300}], config).words == "ending"


def test_a_table_on_a_narrow_terminal_names_the_columns_that_it_leaves_out_and_cuts_nothing() -> None:
    names = ("point", "tokens/s", "states/rank", "note")
    table = Table(names, (("stage3-recompute_full", "12,345", "16.0 MiB", "waits for its turn, " * 3),))
    table = table._replace(drops=("states/rank",), texts=("note",))
    for width in (70, 80):
        screen, out = show(terminal=True, width=width)
        screen.table(table)
        lines = out.getvalue().splitlines()
        assert max(map(len, lines)) <= width
        assert "stage3-recompute_full" in lines[1]
        assert "12,345" in lines[1]
        assert "…" not in out.getvalue()
        left_out = "left out at 70 columns: states/rank; `| cat` without COLUMNS shows all"
        assert (left_out in out.getvalue()) == (width == 70)


def test_a_name_that_is_wider_than_the_terminal_wraps() -> None:
    screen, out = show(terminal=True, width=30)
    screen.table(Table(("point", "tokens/s", "note"), (("p" * 40, "12,345", "x"),)))
    assert out.getvalue().count("p") >= 40
    assert "12,345" in out.getvalue()
    assert "…" not in out.getvalue()


def left_on_terminal(text: str) -> list[str]:
    """The lines that a terminal shows after the text, by the four codes with which rich replaces lines."""
    lines, at = [""], 0
    for part in re.findall(r"\x1b\[1A|\x1b\[2K|\x1b\[\?25[lh]|\n|\r|[^\x1b\n\r]+", text):
        if part == "\x1b[1A":
            at -= 1
        elif part == "\x1b[2K":
            lines[at] = ""
        elif part == "\n":
            at += 1
            lines += [""] * (at == len(lines))
        elif part[0] not in "\x1b\r":
            lines[at] += part
    return [line for line in lines if line]


@pytest.mark.parametrize("width", [80, 40])
def test_a_passing_line_leaves_a_terminal_also_where_it_wraps_and_stays_in_a_file_without_counts(width: int) -> None:
    lines = [f"counting without running: {done} of 2 models and activations" for done in (0, 1)]
    once = "counting without running: 2 models and activations"
    for terminal, left in ((True, ["before", "between", "after"]), (False, ["before", once, "between", "after"])):
        screen, out = show(terminal=terminal, width=width)
        screen.say("before")
        with screen.passing() as tell:
            assert tell is not None
            for line in lines:
                tell(line)
            screen.say("between")
        screen.say("after")
        assert left_on_terminal(out.getvalue()) == left
    with screen.passing(quiet=True) as tell:
        assert tell is None


@pytest.mark.parametrize("terminal", [True, False])
def test_no_line_ends_with_blanks(terminal: bool) -> None:
    out = io.StringIO()
    colours: Any = "standard" if terminal else None
    screen = Screen(Console(file=out, width=40, force_terminal=terminal, color_system=colours))
    screen.say("one or two words " * 5, "bold")
    screen.rows([Row("a", "one or two words " * 5), Row("b", "short")])
    screen.table(Table(("name", "text"), (("a", "words " * 9), ("b", "")), names=2, texts=("text",)))
    plain = re.sub(r"\x1b\[[\d;]*m", "", out.getvalue())
    assert ("\x1b" in out.getvalue(), [line for line in plain.split("\n") if line != line.rstrip()]) == (terminal, [])


def test_the_bar_shows_the_time_that_is_left() -> None:
    screen, out = show(terminal=True)
    screen.begin(CONFIG)
    for step in range(1, 4):
        screen.event({**step_event(step, 2), "step_ms": 10_000.0})
    screen.end()
    assert "3/6 loss 5.9700 9,403 tokens/s rss 512 MiB 30 s left" in squeezed(out)
