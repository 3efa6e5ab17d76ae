"""report.html is one file that works by itself: its structure, its script in a real browser, and what it asks for."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from html.parser import HTMLParser
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import pytest
from harness.browser import Browser
from made_sweep import write_sweep

from orchestrator.records.sweep_record import SweepPaths
from orchestrator.report import comparison
from orchestrator.wings.page import page
from orchestrator.wings.page.figures import figures_of
from orchestrator.wings.page.report_points import facts_of, points_of

GOLDEN = Path(__file__).with_name("page_structure.txt")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--enable-logging=stderr",
    "--virtual-time-budget=5000",
)
# What a person would do, and what the page then shows.
ACTIONS = """<script>
(() => {
  const labels = () => Array.from(document.querySelectorAll("#points tbody tr"))
    .filter((row) => !row.hidden).map((row) => row.cells[1].textContent);
  const header = (title) => Array.from(document.querySelectorAll("#points thead button"))
    .find((button) => button.textContent === title);
  const type = (text) => {
    const filter = document.getElementById("filter");
    filter.value = text;
    filter.dispatchEvent(new Event("input"));
  };
  const seen = {first: labels()};
  header("tokens/s").click(); seen.fastest = labels();
  header("tokens/s").click(); seen.slowest = labels();
  header("point").click(); seen.named = labels();
  type("bf16 -stage0"); seen.filtered = labels();
  seen.shown = document.getElementById("shown").textContent;
  type("");
  const state = document.getElementById("state");
  state.value = "oom"; state.dispatchEvent(new Event("change")); seen.oom = labels();
  const paper = () => getComputedStyle(document.body).backgroundColor;
  document.getElementById("theme").click(); seen.light = paper();
  document.getElementById("theme").click(); seen.dark = paper();
  const bar = document.querySelector("#speed [data-row='1']");
  bar.dispatchEvent(new MouseEvent("mouseover", {bubbles: true}));
  seen.lit = Array.from(document.querySelectorAll("tr.lit")).map((row) => row.dataset.row);
  location.hash = "#point-0";
  window.dispatchEvent(new Event("hashchange")); seen.open = document.getElementById("point-0").open;
  window.dispatchEvent(new Event("beforeprint"));
  seen.folded = document.querySelectorAll("details:not([open])").length;
  const out = document.createElement("pre");
  out.id = "seen"; out.textContent = JSON.stringify(seen);
  document.body.append(out);
})();
</script></body>"""


class Structure(HTMLParser):
    """The headings, sections, columns, pictures and controls of a page, one a line."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.asked: list[str] = []
        self._heading = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.asked += [value for name, value in found.items() if name in ("src", "href", "action", "srcset", "data")]
        if tag == "svg" and "aria-label" in found:
            self.lines.append(f"picture {found['aria-label']}")
        if tag in ("section", "figure", "table", "details") and "id" in found:
            self.lines.append(f"{tag} #{found['id']}")
        if tag in ("input", "select", "script", "meta"):
            self.lines.append(" ".join([tag, *(found[name] for name in ("id", "http-equiv") if name in found)]))
        is_document = self.lines and self.lines[-1].startswith("meta")  # pictures have titles too
        self._heading = tag if tag in ("h1", "h2", "th") or (tag == "title" and is_document) else self._heading

    def handle_data(self, data: str) -> None:
        if self._heading and data.strip():
            self.lines.append(f"{self._heading} {data.strip()}")

    def handle_endtag(self, tag: str) -> None:
        self._heading = "" if tag == self._heading else self._heading


def text_of(sweep: SweepPaths) -> str:
    points = points_of(sweep, comparison.ranked(sweep))
    return page.page("stages", points, figures_of(points), facts_of(sweep))


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> SweepPaths:
    return write_sweep(tmp_path_factory.mktemp("sweep"), 8, failed=range(6, 8))


def test_the_structure_of_the_page_is_the_golden_one(sweep: SweepPaths) -> None:
    """After an intended change: python -m pytest -k golden_one, and copy what it prints."""
    structure = Structure()
    structure.feed(text_of(sweep))
    assert structure.lines == GOLDEN.read_text(encoding="utf-8").splitlines(), "\n".join(structure.lines)


def test_the_page_names_nothing_outside_of_itself(sweep: SweepPaths) -> None:
    text = text_of(sweep)
    structure = Structure()
    structure.feed(text)
    assert [value for value in structure.asked if not value.startswith("#")] == ["data:,"]
    assert "@import" not in text
    assert re.findall(r"url\((?!#)", text) == []
    assert page.POLICY.startswith("default-src 'none';")
    assert text.count(page.POLICY) == 1


def test_text_from_records_is_escaped(sweep: SweepPaths) -> None:
    points = points_of(sweep, comparison.ranked(sweep))
    odd = "<script>alert(1)</script>\x1b[31m&"
    first = replace(points[0].entry, label=odd, message=odd, overrides=(f"zero={odd}",), folder=odd)
    points[0] = replace(points[0], ranked=replace(points[0].ranked, entry=first))
    text = page.page(odd, points, figures_of(points), {"command": [odd]})
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text


def test_a_sweep_of_nothing_measured_has_a_page(tmp_path: Path) -> None:
    text = text_of(write_sweep(tmp_path, 3, failed=range(3)))
    assert "Nothing was measured." in text
    assert "Points without a result" in text


def test_the_files_of_a_report_are_written_together(sweep: SweepPaths) -> None:
    written = {Path(path).name for path in comparison.write(sweep, with_png=True)}
    assert written == {"report.md", "report.html", "report.png", "results.csv"}
    report = sweep.report.read_text(encoding="utf-8")
    named = re.findall(r"\]\((pictures/\w+\.svg)\)", report)
    assert named
    assert all((sweep.root / name).is_file() for name in named)


def test_without_a_library_of_the_page_the_rest_of_the_report_is_written(
    sweep: SweepPaths, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    written = {Path(path).name for path in comparison.write(sweep, with_png=True)}
    assert written == {"report.md", "results.csv"}
    assert f"{sweep.page} could not be made" in caplog.text


class Asked(SimpleHTTPRequestHandler):
    """Serves a folder and remembers what it was asked for."""

    paths: list[str]

    def do_GET(self) -> None:
        self.paths.append(f"{self.headers['Host'].partition(':')[0]}{self.path}")
        super().do_GET()

    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[HTTPServer, list[str]]]:
    paths: list[str] = []
    handler = type("AskedHere", (Asked,), {"paths": paths})
    with HTTPServer(("127.0.0.1", 0), partial(handler, directory=str(tmp_path))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server, paths
        server.shutdown()
        thread.join()


def opened(address: str, profile: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", *flags, "--dump-dom", address]
    return subprocess.run(command, capture_output=True, encoding="utf-8", timeout=300, check=True)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine, in which to open the page")
def test_a_browser_sorts_filters_and_themes_the_page_and_asks_for_nothing_else(
    sweep: SweepPaths, tmp_path: Path, server: tuple[HTTPServer, list[str]]
) -> None:
    http, paths = server
    tmp_path.joinpath("report.html").write_text(text_of(sweep).replace("</body>", ACTIONS), encoding="utf-8")
    # Every name leads to the server here, so that a request to any host would be seen.
    every_host = f"--host-resolver-rules=MAP * 127.0.0.1:{http.server_port}"
    done = opened(f"http://127.0.0.1:{http.server_port}/report.html", tmp_path / "profile", every_host)
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    assert [path for path in paths if path.startswith("127.0.0.1")] == ["127.0.0.1/report.html"]
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout)
    assert found is not None, done.stdout[-2000:]
    seen = json.loads(found[1].replace("&gt;", ">").replace("&lt;", "<").replace("&amp;", "&"))
    measured = [row.entry.label for row in comparison.ranked(sweep) if row.entry.result is not None]
    assert seen["first"][: len(measured)] == measured
    assert seen["fastest"] == seen["first"]
    assert seen["slowest"][: len(measured)] == measured[::-1], "points without a speed stay last"
    assert seen["named"] == sorted(seen["first"])
    assert seen["filtered"] == [label for label in seen["named"] if "bf16" in label and "stage0" not in label]
    assert seen["shown"] == f"{len(seen['filtered'])} of 8 points"
    assert len(seen["oom"]) == 1
    assert (seen["light"], seen["dark"]) == ("rgb(255, 255, 255)", "rgb(20, 24, 29)")
    assert seen["lit"] == ["1"]
    assert seen["open"]
    assert seen["folded"] == 0


@pytest.mark.full
@pytest.mark.parametrize("count", [2, 8, 30, 200])
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine, in which to open the page")
def test_pages_of_any_size_open_without_an_error(tmp_path: Path, count: int) -> None:
    sweep = write_sweep(tmp_path / "output", count, failed=range(count - 1, count))
    comparison.write(sweep)
    for width in (1280, 420):
        with Browser(width, 900) as browser:
            browser.open(sweep.page.as_uri())
            assert browser.wait_for("document.readyState == 'complete'")
            assert browser.value("document.documentElement.scrollWidth") == width, "nothing leaves the page"
            # The table is wider than its frame, which scrolls up to the last column.
            browser.value("document.querySelector('#all-points .wide').scrollLeft = 1e6")
            last = "document.querySelector('#points thead th:last-child').getBoundingClientRect().right"
            assert 0 < browser.value(last) <= width
    done = opened(sweep.page.as_uri(), tmp_path / "profile")
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    assert done.stdout.count("<tr class=") == count
    assert sweep.page.stat().st_size < 2 << 20


@pytest.mark.full
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine, in which to open the page")
def test_on_paper_the_table_has_a_landscape_page_and_the_settings_few_pages(sweep: SweepPaths, tmp_path: Path) -> None:
    printed = tmp_path / "page.pdf"
    comparison.write(sweep)
    paper = [f"--print-to-pdf={printed}", "--no-pdf-header-footer", f"--user-data-dir={tmp_path / 'profile'}"]
    subprocess.run([str(CHROMIUM), *FLAGS, *paper, sweep.page.as_uri()], capture_output=True, timeout=300, check=True)
    boxes = re.findall(rb"/MediaBox \[0 0 ([\d.]+) ([\d.]+)\]", printed.read_bytes())
    wide = [float(width) > float(height) for width, height in boxes]
    assert wide.count(True) == 1
    assert len(wide) <= 8
