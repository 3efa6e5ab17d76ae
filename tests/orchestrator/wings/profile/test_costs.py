"""What a billion tokens cost, the joules of a token, and the points that are named besides the fastest."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from points import make_config
from stub_worker import make_result

from orchestrator.config.schema import to_dict
from orchestrator.report import named_apart, ranking, sweep_files
from orchestrator.report.entry import Entry
from orchestrator.wings.profile import costs, efficiency

CONFIG = to_dict(make_config(Path("outputs")))
EVEN = (0.99, 0.995, 1.0, 1.0, 1.005, 1.01)


def entry(label: str, speed: float, *, price: float | None = 2.0, currency: str = "EUR", gpus: int = 0) -> Entry:
    """A point at this speed on so many GPUs; 0: on CPUs."""
    result = make_result(make_config(Path("outputs")), speed)
    result["throughput"]["tokens_per_second"] = {"median": speed, "p10": speed, "p90": speed}
    tokens = result["batch"]["tokens_per_step"]
    result["rounds"] = [
        {"number": number, "began": 0.0, "step_ms": [1e3 * tokens / (speed * share)]}
        for number, share in enumerate(EVEN, start=1)
    ]
    result["session"] = "one"
    if gpus:
        result |= {"device": "cuda", "world": gpus}
    config = {**CONFIG, "hardware": {"price_per_hour": price, "currency": currency}}
    return Entry(label, "ok", result, config=config, overrides=(f"zero={label}",))


def held(one: Entry, activations: int) -> Entry:
    assert one.result is not None
    memory = {**one.result["memory"], "activations_bytes": activations}
    return replace(one, result={**one.result, "memory": memory})


def names(*entries: Entry) -> list[str]:
    return named_apart.lines(ranking.rank(entries))


def test_a_billion_tokens_cost_the_price_of_all_devices_for_the_time_that_they_take() -> None:
    # 10^9 tokens at 10^6 a second take 1000 s.
    one, eight = entry("a", 1e6), entry("b", 1e6, gpus=8)
    assert costs.cost_per_billion(one.config, one.result) == pytest.approx(2.0 * 1000 / 3600)
    assert costs.cost_per_billion(eight.config, eight.result) == pytest.approx(8 * 2.0 * 1000 / 3600)
    nodes = {**one.config, "resources": {**CONFIG["resources"], "nodes": 3}}
    assert costs.cost_per_billion(nodes, one.result) == pytest.approx(3 * 2.0 * 1000 / 3600)
    assert costs.cost_per_billion(CONFIG, one.result) is None
    assert costs.cost_per_billion(one.config, None) is None


def test_the_price_of_a_cluster_is_taken_for_gpus_without_one_of_their_own() -> None:
    cluster = {**CONFIG, "cluster": {"usd_per_gpu_hour": 3.0}, "resources": {"device": "cuda"}}
    assert costs.price_of(cluster) == (3.0, "USD")
    assert costs.price_of({**cluster, "hardware": {"price_per_hour": 1, "currency": None}}) == (1.0, "")
    assert costs.price_of({**cluster, "resources": {"device": "cpu"}}) is None


def test_joules_are_the_median_of_rounds_and_unknown_if_a_round_has_none() -> None:
    result: dict[str, Any] = entry("a", 100).result or {}
    assert costs.joules_per_step(result) is None
    for one, joules in zip(result["rounds"], (1.0, 9.0, 2.0, 2.0, 3.0, 2.0), strict=True):
        one["joules_per_step"] = joules
    assert costs.joules_per_step(result) == 2.0
    assert costs.joules_per_token(result) == 2.0 / result["batch"]["tokens_per_step"]
    assert any(row.name == "energy" and "RAPL" in row.text for row in efficiency.rows(result, CONFIG))
    result["rounds"][0]["joules_per_step"] = None
    assert costs.joules_per_token(result) is None


def test_the_cheapest_and_the_smallest_are_named_apart_from_the_fastest() -> None:
    fast = held(entry("fast", 800.0, gpus=8), 300)
    cheap, small = held(entry("cheap", 200.0, gpus=1), 200), held(entry("small", 90.0, gpus=1), 100)
    ranked = ranking.rank([fast, cheap, small])
    assert ranking.conclusion(ranked) == "fastest: fast"
    cheapest, smallest = named_apart.lines(ranked)
    assert cheapest.startswith("cheapest: cheap, 2,778 EUR per billion tokens")
    assert smallest.startswith("smallest: small, ")
    both = names(entry("best", 200.0), held(entry("other", 100.0), 10**9))
    assert [line.split(",")[0] for line in both] == ["cheapest: best", "smallest: best"]


def test_points_whose_rounds_show_no_difference_in_cost_tie() -> None:
    cheapest, _ = names(entry("a", 100.0), entry("b", 99.5), entry("c", 90.0))
    assert cheapest.startswith("cheapest: a tie of a, b, ")
    # b is half as fast on half of the GPUs.
    cheapest, _ = names(entry("a", 100.0, gpus=8), entry("b", 50.0, gpus=4), entry("c", 50.0, gpus=8))
    assert cheapest.startswith("cheapest: a tie of a, b, ")


def test_no_cheapest_is_named_without_a_price_and_across_currencies() -> None:
    assert [line.partition(":")[0] for line in names(entry("a", 2, price=None), entry("b", 1, price=None))] == [
        "smallest"
    ]
    assert names(entry("a", 2), entry("b", 1, currency="USD"))[0] == (
        "cheapest: not named, the prices have different currencies: EUR, USD"
    )
    some = names(entry("a", 2), entry("b", 1, price=None))[0]
    assert some.endswith(", of the 1 of 2 points with a price and a ranked speed")
    assert names(entry("a", 2)) == []
    assert names(entry("a", 2, price=0.0), entry("b", 1, price=0.0))[0].startswith("cheapest: a tie of a, b, 0 EUR")


def test_the_table_and_results_csv_have_costs_where_they_are_known() -> None:
    ranked = ranking.rank([entry("a", 1e6), entry("b", 5e5, price=None)])
    table = ranking.table(ranked)
    column = table.header.index("EUR/1B tokens")
    assert [row[column] for row in table.rows] == ["0.556", "-"]
    assert "J/token" not in table.header
    first, second = csv.DictReader(io.StringIO(sweep_files.results_csv(ranked)))
    assert (float(first["cost_per_billion_tokens"]), first["currency"]) == (pytest.approx(2000 / 3600), "EUR")
    assert (second["cost_per_billion_tokens"], second["currency"], second["mfu"]) == ("", "", "")
    assert "EUR" not in "".join(ranking.table(ranking.rank([entry("b", 5e5, price=None)])).header)
