"""The numbers and shapes of the report's pictures, of sweeps of any size."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from made_sweep import LIMIT, write_sweep
from matplotlib.lines import Line2D
from matplotlib.text import Text
from points import make_config
from stub_worker import make_result

from orchestrator.config.schema import to_dict
from orchestrator.report import comparison, ranking
from orchestrator.report.entry import Entry
from orchestrator.report.varied import varied_settings
from orchestrator.rounds.intervals import RoundsEstimate
from orchestrator.wings.page import bar_figures, page, plane_figures
from orchestrator.wings.page.charts.bar_data import MOST_STRETCH, Bar, BarChart, BarPart, axis_end
from orchestrator.wings.page.charts.bars import MOST_ROWS, picture_of
from orchestrator.wings.page.charts.canvas import WIDTH, AxisUnit, LegendEntry, Picture, document, png, shortened
from orchestrator.wings.page.charts.palette import DARK, LIGHT, PAINTS, SERIES
from orchestrator.wings.page.charts.planes import Dot, Plane, padded_range, scatter
from orchestrator.wings.page.checks import drift, warnings
from orchestrator.wings.page.figures import figures_of, settings_of
from orchestrator.wings.page.plane_figures import pareto
from orchestrator.wings.page.report_points import ReportPoint, StepReading, points_of
from orchestrator.wings.page.scaling import STRONG, WEAK, baseline_text, scalings

UNIT = AxisUnit("tokens/s")
NAMES = ["speed", "memory", "speed_and_memory", "phases", "sent", "learning", "scaling"]
SVG = "{http://www.w3.org/2000/svg}"


def lightness(colour: str) -> float:
    """CIE L* (0 black, 100 white) of a colour such as "#0072b2", which is what a grey print shows of it."""
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in channels)
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return 116 * luminance ** (1 / 3) - 16 if luminance > 216 / 24389 else luminance * 24389 / 27


def points_on_disk(folder: Path, count: int, failed: range = range(0)) -> list[ReportPoint]:
    sweep = write_sweep(folder, count, failed=failed)
    return points_of(sweep, comparison.ranked(sweep))


def texts_of(picture: Picture) -> list[str]:
    return [text.get_text() for text in picture.figure.findobj(Text)]


def made_points(*speeds: float, worlds: tuple[int, ...] = (), weak: bool = True) -> list[ReportPoint]:
    """Points of one configuration at these speeds and numbers of ranks."""
    entries = []
    for number, speed in enumerate(speeds):
        world = worlds[number] if worlds else 2
        config = make_config(Path("outputs"))
        batch = replace(config.batch, global_size=16 * world if weak else 16)
        config = replace(config, batch=batch, resources=replace(config.resources, ranks=world))
        entries.append(Entry(f"p{number}", "ok", make_result(config, speed), config=to_dict(config)))
    rows = ranking.rank(entries)
    return [ReportPoint(number, row, int(row.entry.label[1:])) for number, row in enumerate(rows)]


# ---- colours and axes -----------------------------------------------------------------------------------------------


def test_paints_differ_in_lightness_or_hatch_and_series_in_marker_and_dash() -> None:
    for one, other in itertools.combinations(PAINTS, 2):
        difference = abs(lightness(LIGHT[one.colour]) - lightness(LIGHT[other.colour]))
        assert one.hatch != other.hatch or difference >= 15, (one, other)
    for first, second in itertools.combinations(SERIES, 2):
        assert first.marker != second.marker
        assert first.dash != second.dash


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_text_is_readable_on_the_background_of_both_themes(theme: dict[str, str]) -> None:
    def luminance(colour: str) -> float:
        value = lightness(colour)
        return ((value + 16) / 116) ** 3 if value > 8 else value * 27 / 24389

    for name in ("ink", "muted"):
        dark, light = sorted((luminance(theme[name]), luminance(theme["paper"])))
        assert (light + 0.05) / (dark + 0.05) >= 4.5  # WCAG 2.1, level AA


def test_a_legend_is_read_in_rows_and_names_of_dots_that_would_cover_each_other_are_left_out() -> None:
    legend = tuple(LegendEntry(f"a name of some length {number}", SERIES[number]) for number in range(5))
    plane = Plane("title", "x", "y", UNIT, UNIT, legend)
    dots = [Dot(x, x, SERIES[0], number, f"name {number}") for number, x in enumerate((0.0, 0.01, 10.0))]
    picture = scatter(plane, dots)
    assert [text.get_text() for text in picture.axes.texts if text.get_visible()] == ["name 0", "name 2"]
    places = [text.get_window_extent() for text in picture.figure.legends[0].get_texts()]
    read = sorted(range(5), key=lambda at: (-round(places[at].y0), places[at].x0))
    names = [picture.figure.legends[0].get_texts()[at].get_text() for at in read]
    assert len({round(box.y0) for box in places}) > 1
    assert names == [entry.name for entry in legend]


def test_a_range_of_one_number_is_not_empty() -> None:
    low, high = padded_range([5.0])
    assert low < 5 < high


def test_a_long_label_keeps_both_of_its_ends() -> None:
    assert shortened("stage3-bf16-micro4", 40) == "stage3-bf16-micro4"
    assert shortened("stage3-bf16-by_operation-micro16", 15) == "stage3-…micro16"


def test_a_limit_far_beyond_the_bars_does_not_flatten_them() -> None:
    bars = (Bar("a", (100.0,)), Bar("b", (80.0,), outline=1e6, lacking=False))
    chart = BarChart("memory", "", UNIT, (BarPart("x", PAINTS[0]),), bars, 1e9, "limit: 1 GB")
    assert axis_end(chart) < 110
    assert "limit: 1 GB, beyond this picture" in texts_of(picture_of(chart))
    near = replace(chart, limit=MOST_STRETCH * 100)
    assert axis_end(near) >= MOST_STRETCH * 100
    assert "limit: 1 GB" in texts_of(picture_of(near))


@pytest.mark.parametrize("count", [1, MOST_ROWS, MOST_ROWS + 1, 400])
def test_bars_have_their_names_inside_of_the_picture_and_a_bounded_height(count: int) -> None:
    bars = tuple(Bar(f"point{number}", (1.0 + number,), number, note="a note") for number in range(count))
    picture = picture_of(BarChart("speed", "", UNIT, (BarPart("x", PAINTS[0]),), bars))
    assert picture.height < 1000
    texts = texts_of(picture)
    assert texts.count("a note") == min(count, MOST_ROWS)
    assert ("tokens/s (the first 40 of 400 rows)" in texts) == (count == 400)
    document(picture)
    boxes = [text.get_window_extent() for text in picture.axes.texts]
    assert all(box.x0 >= 0 and box.x1 <= picture.width for box in boxes)


# ---- settings -------------------------------------------------------------------------------------------------------


def test_settings_that_vary_are_columns_and_those_that_change_together_are_one() -> None:
    words = [
        ("zero=stage0", "batch.micro=1", "batch.accumulation=4", "output=a", "seed=1"),
        ("zero=stage1", "batch.micro=16", "batch.accumulation=2", "output=b", "seed=1"),
        ("zero=stage0", "batch.micro=4", "batch.accumulation=1", "output=c", "seed=1"),
    ]
    zero, batch = varied_settings(words, [2, 1, 0])
    assert (zero.name, zero.levels) == ("zero", ("stage0", "stage1"))
    assert batch.name == "batch.micro, batch.accumulation"
    assert batch.levels == ("1, 4", "4, 1", "16, 2"), "numbers are ordered by size"
    assert varied_settings(words[:1], [0]) == []
    (some,) = varied_settings([("a=1",), ()], [0, 1])
    assert some.values == ("1", "(default)")


def test_the_pareto_front_holds_what_nothing_beats_in_both() -> None:
    assert pareto([(1, 10), (2, 30), (3, 20), (4, 40), (2, 25)]) == [0, 1, 3]
    assert pareto([(1, 10), (1, 10)]) == [0]


@pytest.mark.parametrize(
    ("rounds_ms", "hatched", "front"),
    [
        ([[10.0], [20.0]], {"sky"}, "speeds are ranked from 3 rounds, which none of 2 points has"),
        ([[10.0] * 3, [20.0]], {"sky"}, "speeds are ranked from 3 rounds, which 1 of 2 points has"),
        ([[10.0] * 3, [10.0] * 3], set(), "the rounds show no difference between the speeds"),
        ([[10.0] * 3, [20.0] * 3], set(), ""),
    ],
)
def test_what_is_not_ranked_is_hatched_and_has_no_front(
    rounds_ms: list[list[float]], hatched: set[str], front: str
) -> None:
    entries = [point.entry for point in made_points(200.0, 100.0)]
    for entry, rounds, held in zip(entries, rounds_ms, (2, 1), strict=True):
        assert entry.result is not None
        entry.result["rounds"] = [{"number": at, "began": 0.0, "step_ms": [ms]} for at, ms in enumerate(rounds, 1)]
        entry.result["memory"]["activations_bytes"] *= held  # the faster one is larger: both would be on a front
    points = [ReportPoint(number, row) for number, row in enumerate(ranking.rank(entries))]
    drawn = {figure.name: figure for figure in figures_of(points)}
    paints = [bar_figures._speed_paint(point) for point in points]
    assert {paint.colour for paint in paints if paint.hatch} == hatched
    assert ("not ranked: fewer than 3 rounds" in texts_of(drawn["speed"].picture)) == bool(hatched)
    plane = drawn["speed_and_memory"]
    fronts = [line for line in plane.picture.axes.get_lines() if not line.get_gid()]  # all else has its row
    assert len(fronts) == (0 if front else 1)
    assert plane.caption.endswith(f"{front}." if front else "by their medians: p1, p0.")


def test_one_row_of_much_more_memory_hides_no_other() -> None:
    """DeepSpeed's bucket of 1.87 GiB beside rows of some MiB."""
    points = made_points(100.0, 200.0, 300.0, 400.0)
    for point in points[1:]:
        assert point.result is not None
        point.result["memory"] |= {
            "states": [],
            "other_tensors_bytes": 0,
            "activations_bytes": (5 + point.number) << 20,
        }
    assert points[0].result is not None
    points[0].result["memory"] |= {"states": [], "other_tensors_bytes": 0, "activations_bytes": 2008023040}
    drawn = {figure.name: figure.picture for figure in figures_of(points)}
    end = drawn["memory"].axes.get_xlim()[1]
    assert end == pytest.approx(1.04 * (8 << 20))
    assert max(bar.get_x() + bar.get_width() for bar in drawn["memory"].axes.patches) <= end
    assert {"1.87 GiB", "8.00 MiB"} <= {text.partition(",")[0] for text in texts_of(drawn["memory"])}
    plane = drawn["speed_and_memory"].axes
    assert plane.get_xlabel() == "counted tensors of a rank [logarithmic]"
    assert [text.get_text() for text in plane.get_xticklabels()] == ["8.00 MiB", "32.0 MiB", "128 MiB", "512 MiB"]


# ---- scaling --------------------------------------------------------------------------------------------------------


def test_weak_and_strong_scaling_are_measured_against_the_fewest_ranks() -> None:
    (weak,) = scalings(made_points(100, 180, 300, worlds=(1, 2, 4)))
    assert weak.kind == WEAK
    assert [weak.efficiency(point)[1] for point in weak.points] == pytest.approx([1, 0.9, 0.75])
    (strong,) = scalings(made_points(200, 320, worlds=(2, 4), weak=False))
    assert (strong.kind, strong.base.label) == (STRONG, "p0")
    assert strong.efficiency(strong.points[1])[1] == pytest.approx(0.8)
    assert scalings(made_points(100, 180)) == []


def test_missing_baselines_are_named() -> None:
    assert baseline_text(made_points(100)) == (
        "none without sharding (zero=stage0) was measured; none on one rank was measured"
    )
    assert baseline_text(made_points(100, worlds=(1,))).endswith("; on one rank: p0")


# ---- warnings -------------------------------------------------------------------------------------------------------


def test_a_row_with_another_loss_for_the_same_work_is_named() -> None:
    points = made_points(100, 90, 80)
    assert warnings(points) == []
    assert points[1].result is not None
    points[1].result["loss"]["last"] *= 1.05
    assert warnings(points) == ["the same work ended at another loss: p1 (5.1469); the median of such rows is 4.9018"]
    points[1].result["loss"]["last"] = math.nan
    assert warnings(points) == ["p1 ended without a finite loss"]


def test_a_step_that_slows_down_while_it_is_measured_is_reported_and_noise_is_not() -> None:
    (point,) = made_points(100)

    def with_times(times: list[float]) -> ReportPoint:
        return replace(point, steps=tuple(StepReading(at, 3.0, time, True) for at, time in enumerate(times)))

    assert drift(with_times([100.0] * 10 + [125.0] * 10)) == pytest.approx(0.25)
    assert drift(with_times([100.0, 130.0] * 10)) is None
    assert drift(with_times([100.0, 150.0])) is None
    (line,) = warnings([with_times([100.0] * 10 + [125.0] * 10)])
    assert line.endswith(": p0 (+25 %)")


def test_a_wide_range_is_reported_as_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranking, "speed", lambda result: RoundsEstimate(80.0, 100.0, 115.0))
    assert warnings(made_points(100)) == ["noise: the range of tokens/s is wider than 20 % of its median: p0 (35 %)"]


# ---- pictures -------------------------------------------------------------------------------------------------------


def test_every_picture_is_drawn_from_records_and_is_valid_xml(tmp_path: Path) -> None:
    points = points_on_disk(tmp_path, 20, range(15, 18))
    drawn = figures_of(points)
    assert [figure.name for figure in drawn] == NAMES
    for figure in drawn:
        text = document(figure.picture)
        root = ElementTree.fromstring(text)
        assert root.get("aria-label") == figure.picture.title
        assert not re.search(r"\b(nan|inf)\b", text), figure.name
        assert "http" not in text.replace('xmlns="http://www.w3.org/2000/svg"', "")
    by_name = {figure.name: texts_of(figure.picture) for figure in drawn}
    assert "tokens/s" in by_name["speed"]
    assert "largest over the ranks [MiB]" in by_name["memory"]
    assert f"limit of a rank: {LIMIT >> 20}.0 MiB" in by_name["memory"]
    assert {"oom", "pruned", "refused"} <= set(by_name["speed"])
    assert any(text.endswith(", exact") for text in by_name["memory"])
    assert "loss [nats a token]" in by_name["learning"]
    assert any(text.endswith(" MiB, equal") for text in by_name["sent"])


def test_the_settings_of_points_follow_the_order_of_the_table(tmp_path: Path) -> None:
    points = points_on_disk(tmp_path, 8)
    zero = settings_of(points)[0]
    assert [f"zero={value}" for value in zero.values] == [point.entry.overrides[0] for point in points]
    assert zero.levels == ("stage0", "stage1", "stage2", "stage3")


def test_the_curves_of_a_training_have_its_validations_and_a_bounded_number_of_steps() -> None:
    (point,) = made_points(100.0)
    steps = tuple(StepReading(step, 5.0 - step / 4999, 1.0, counted=True) for step in range(1, 5000))
    held = ((1000, 4.9), (3000, 4.5), (4999, 4.1))
    figure = plane_figures.learning([replace(point, steps=steps, validations=held)])
    assert figure is not None
    assert "Dotted: that loss during training" in figure.caption
    lines = [artist.get_xdata() for artist in figure.picture.figure.findobj(Line2D) if artist.get_gid()]
    curve, dotted = (xs for xs in lines if len(xs) > 1)
    assert plane_figures.MOST_STEPS / 2 < len(curve) <= plane_figures.MOST_STEPS + 1
    assert len(dotted) == len(held)
    assert curve[-1] == dotted[-1]  # both end at the last step


def test_numbers_that_no_bar_can_show_are_drawn_as_nothing() -> None:
    points = made_points(100, 90)
    assert points[0].result is not None
    assert points[1].result is not None
    points[0].result["memory"]["activations_bytes"] = 10**400
    points[0].result["phases_ms"] = dict.fromkeys(points[0].result["phases_ms"], math.inf)
    points[1].result["communication"]["data"]["all_gather"]["bytes"] = math.nan
    points[1].result["throughput"]["tokens_per_second"] = {"p10": -1, "median": math.inf, "p90": math.nan}
    drawn = figures_of(points)
    for figure in drawn:
        ElementTree.fromstring(document(figure.picture))
    assert png([figure.picture for figure in drawn])


def test_the_page_has_the_examples_of_a_training_as_text_alone() -> None:
    (point,) = made_points(100.0)
    part = {"ids": [1], "text": "<b>2 plus 2\n"}
    told = {"epochs": 1.0, "tokens": 9, "learned_tokens": 4, "validations": 1, "best": None, "last_checkpoint": None}
    assert point.result is not None
    point.result["training"] = {**told, "examples": [dict.fromkeys(("prompt", "answer", "reference"), part)]}
    html = page.page("trained", [point], [], {})
    assert "<dt>  continued</dt><dd>&#39;&lt;b&gt;2 plus 2\\n&#39;</dd>" in html
    assert "1 epoch, 9 tokens, of which 4 count in the loss" in html


def test_a_sweep_without_any_result_has_a_picture_of_its_states(tmp_path: Path) -> None:
    points = points_on_disk(tmp_path, 3, range(3))
    assert [figure.name for figure in figures_of(points)] == ["speed", "memory"]
    assert figures_of([]) == []


def test_the_png_holds_all_pictures(tmp_path: Path) -> None:
    pictures = [figure.picture for figure in figures_of(points_on_disk(tmp_path, 2))]
    pixels = png(pictures, factor=0.5)
    assert pixels[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(pixels[at : at + 4], "big") for at in (16, 20))
    assert width == (2 * WIDTH + 3 * 24) / 2
    heights = sum(picture.height + 24 for picture in pictures) / 2
    assert heights / 2 < height < heights


def test_the_marks_of_a_picture_have_their_rows_their_tips_and_the_colours_of_the_page() -> None:
    bars = (Bar("a & b", (100.0,), 7, note="<8.583>"), Bar("$x_1$", (80.0,), 8))
    picture = picture_of(BarChart("speed", "", UNIT, (BarPart("x", PAINTS[0]),), bars))
    root = ElementTree.fromstring(document(picture))
    assert {group.get("data-row") for group in root.iter(f"{SVG}g")} == {None, "7", "8"}
    assert [title.text for title in root.iter(f"{SVG}title")] == ["a & b; <8.583>", "$x_1$"]
    assert {"a & b", "$x_1$", "<8.583>"} <= {text.text for text in root.iter(f"{SVG}text")}
    drawn = picture.drawn
    assert "var(--blue)" in drawn
    assert re.findall(r"#[0-9a-f]{6}|font-family| id=\"(?![pm])", drawn) == []
