"""Rows that round more than their exact form say so in the plan and in the comparison, with the difference in loss."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

from points import make_config
from stub_worker import make_result

from orchestrator.config.lossy import exact_form, lossy_words
from orchestrator.config.schema import RunConfig, to_dict
from orchestrator.records.run_state import RunState
from orchestrator.records.sweep_record import Planned
from orchestrator.report import ranking, sweep_files, sweep_table
from orchestrator.report.entry import Entry
from orchestrator.text.units import ABSENT
from orchestrator.wings.page.checks import warnings
from orchestrator.wings.page.report_points import ReportPoint
from zero_runtime.optim.configs import AdamW8bitConfig, AdamWConfig, OneBitAdamConfig
from zero_runtime.precision import MixedPrecision
from zero_runtime.wire import Wire

EXACT = make_config(Path("outputs"))
STATES = replace(EXACT, optimizer=replace(EXACT.optimizer, rule=replace(EXACT.optimizer.rule, state_dtype="bf16")))
CODES = replace(EXACT, optimizer=replace(EXACT.optimizer, rule=AdamW8bitConfig(beta2=0.95, weight_decay=0.1)))
MASTERS = replace(EXACT, precision=replace(EXACT.precision, dtypes=MixedPrecision("bf16", master="bf16")))
MESSAGES = replace(EXACT, zero=replace(EXACT.zero, wire=Wire("int8", "int4", error_feedback=True)))


def words(config: RunConfig) -> tuple[str, ...]:
    return lossy_words(to_dict(config))


def entry(label: str, config: RunConfig, loss: float) -> Entry:
    result: dict[str, Any] = make_result(config)
    result["loss"]["last"] = loss
    return Entry(label, "ok", result, config=to_dict(config))


def test_the_words_name_each_lossy_setting_and_the_exact_form_has_none() -> None:
    assert isinstance(EXACT.optimizer.rule, AdamWConfig)
    assert words(EXACT) == ()
    assert words(STATES) == ("bf16 states",)
    assert words(CODES) == ("8-bit states",)
    assert words(MESSAGES) == ("int8 gathers", "int4 reductions with error feedback")
    assert [exact_form(to_dict(one)) for one in (STATES, CODES, MESSAGES)] == [to_dict(EXACT)] * 3
    assert lossy_words({}) == ()


def test_the_comparison_has_the_loss_difference_where_the_exact_row_is_there() -> None:
    both = [entry("exact", EXACT, 4.0), entry("int", MESSAGES, 4.0125), entry("8bit", CODES, 3.5)]
    table = ranking.table(ranking.rank(both))
    assert table.header[-2:] == ("lossy", "loss - exact")
    found = {row[1]: row[-2:] for row in table.rows}
    assert found == {
        "exact": ("exact", ABSENT),
        "int": ("int8 gathers, int4 reductions with error feedback", "+0.0125"),
        "8bit": ("8-bit states", "-0.5000"),
    }
    alone = ranking.rank([entry("int", MESSAGES, 4.0125)])
    assert ranking.table(alone).header[-1] == "lossy", "nothing to compare the loss with"
    (row,) = csv.DictReader(io.StringIO(sweep_files.results_csv(alone)))
    assert (row["lossy"], row["loss_to_exact"]) == ("int8 gathers, int4 reductions with error feedback", "")


def warned(*entries: Entry) -> list[str]:
    """What the report says of rows with these losses, beyond noise."""
    return warnings([ReportPoint(number, row) for number, row in enumerate(ranking.rank(entries))])


def test_a_lossy_row_that_learns_something_else_is_named_whatever_makes_it_lossy() -> None:
    exact = entry("exact", EXACT, 4.0)
    for config in (STATES, CODES, MESSAGES, MASTERS):
        assert warned(exact, entry("near", config, 4.07)) == []
        assert warned(exact, entry("far", config, 4.09)) == [
            "the same work ended at another loss: far (4.0900); the median of the exact rows is 4.0000"
        ]


def test_many_lossy_rows_do_not_outvote_the_exact_one() -> None:
    lossy = [entry(name, config, 4.2) for name, config in (("a", STATES), ("b", CODES), ("c", MESSAGES))]
    (line,) = warned(entry("exact", EXACT, 4.0), *lossy)
    assert line.endswith("the median of the exact rows is 4.0000")
    assert "exact (" not in line
    assert warned(*lossy) == []  # nothing exact to compare them with


def test_one_bit_adam_is_compared_with_the_adamw_that_it_compresses() -> None:
    plain = AdamWConfig(beta2=0.999, weight_decay=0.1)
    signs = OneBitAdamConfig(beta2=0.999, weight_decay=0.1, warmup_updates=2)
    exact, onebit = (
        replace(EXACT, optimizer=replace(EXACT.optimizer, rule=rule, clip_norm=None)) for rule in (plain, signs)
    )
    (line,) = warned(entry("exact", exact, 4.0), entry("signs", onebit, 4.5), entry("other", EXACT, 4.5))
    assert line == "the same work ended at another loss: signs (4.5000); the median of the exact rows is 4.0000"


def test_without_a_lossy_row_the_tables_have_no_such_column() -> None:
    assert not {"lossy", "loss - exact"} & set(ranking.table(ranking.rank([entry("exact", EXACT, 4.0)])).header)
    plan = [Planned("exact", (), RunState.queued, config=to_dict(EXACT))]
    assert sweep_table.plan_table(plan).header == sweep_table.PLAN_HEADER


def test_the_plan_names_what_is_lossy() -> None:
    plan = [Planned(name, (), RunState.queued, config=to_dict(one)) for name, one in (("a", EXACT), ("b", STATES))]
    assert [row[-1] for row in sweep_table.plan_table(plan).rows] == ["exact", "bf16 states"]
