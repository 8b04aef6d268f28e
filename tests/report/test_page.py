"""The HTML report: one file, opened by a headless Chromium as a user would open it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusion_compiler as fc
from fusion_compiler.report.page import page
from tests.browser import CONTRAST, THROUGH_BOXES, UPWARDS, chromium
from tests.reports import HOSTILE, report_of

Page = Any  # playwright.sync_api.Page, where Playwright is installed
Open = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as launched:
        yield launched


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Opens a report's page from a file. Whatever the test does, nothing may go wrong or be fetched."""
    problems: list[str] = []
    contexts: list[Any] = []

    def open_page(report: dict[str, Any], **options: Any) -> Page:
        file = tmp_path / "report.html"
        file.write_text(page(report), encoding="utf-8")
        settings = {"viewport": {"width": 1400, "height": 900}, "reduced_motion": "reduce"}
        context = browser.new_context(**(settings | options))
        context.set_default_timeout(5_000)
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda message: problems.append(f"{message.type}: {message.text}"))
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.on("request", lambda request: request.url != file.as_uri() and problems.append(request.url))
        tab.goto(file.as_uri())
        tab.wait_for_selector("html[data-ready]", timeout=10_000)
        return tab

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []


def unit(report: dict[str, Any], name: str, graph: int = 0) -> dict[str, Any]:
    return next(unit for unit in report["graphs"][graph]["units"] if unit["name"] == name)


def panel(tab: Page) -> str:
    return tab.locator("#panel").inner_text()


def find(tab: Page, text: str) -> None:
    tab.fill("#search", text)
    tab.press("#search", "Enter")


def click_line(tab: Page, title: str) -> None:
    """A real click in the middle of the first line whose tooltip begins with `title`."""
    spot = tab.evaluate(
        """title => {
            const line = [...document.querySelectorAll(".line")]
                .find(line => line.querySelector("title").textContent.startsWith(title));
            const path = line.querySelector(".ink");
            const middle = path.getPointAtLength(path.getTotalLength() / 2);
            const point = middle.matrixTransform(path.getScreenCTM());
            return [point.x, point.y];
        }""",
        title,
    )
    tab.mouse.click(*spot)


def test_times_of_the_host_are_shown_and_compared_with_nothing(opened: Open) -> None:
    report = report_of(60, measured=True)
    report["measured"]["clock"] = "host"
    for each in (u for graph in report["graphs"] for u in graph["units"] if u["measured"]):
        each["measured"] |= {"bandwidth": None, "error": None}
    tab = opened(report)
    tab.click(".unit[data-unit=rotate_0] .name")
    assert "11.0 us on the host's clock" in panel(tab) and "NaN" not in panel(tab)
    tab.click("#tab-overview")
    assert "on the host's clock" in panel(tab) and "Furthest" not in panel(tab)


def test_a_click_on_a_cluster_shows_its_kernel_and_figures(opened: Open) -> None:
    report = report_of(60, measured=True)
    tab = opened(report)
    for each in report["graphs"][0]["units"]:
        assert tab.locator(f".unit[data-unit='{each['name']}'][data-class='{each['class']}']").count() == 1
    tab.click(".unit[data-unit=rotate_0] .name")
    assert tab.locator("pre.kernel").text_content() == report["kernels"]["rotate_kernel"]
    assert tab.locator("pre.kernel .hljs-keyword").first.text_content() == "def"
    tab.click("#panel >> text=Copy")
    tab.wait_for_selector("#panel >> text=/Copied|Selected/")
    if tab.locator("#panel >> text=Selected").count():
        assert tab.evaluate("getSelection().toString()") == report["kernels"]["rotate_kernel"]
    text = panel(tab)
    rotate = unit(report, "rotate_0")
    assert rotate["why"] in text and "rotate = f(x)" in text and "rotate.py:18" in text
    assert "10.0 us, in eager 37.8 us" in text
    assert "11.0 us at 3.10 TB/s; the prediction is 9.09% below" in text
    assert "25.2 MB: 16.8 MB read, 8.39 MB written" in text and "4096 rows x 1024" in text
    assert "Instead of 6 calls of eager" in text
    rows = tab.locator("#panel .ops tr")
    assert rows.count() == len(rotate["ops"])
    assert "mul" in rows.first.inner_text() and "f16[8, 512, 1024]" in rows.first.inner_text()
    tab.click("#tab-overview")
    assert "900 us a step on h200 (20 repetitions), 12.0 us of it in kernels of no unit." in panel(tab)
    assert tab.locator(".others td").all_inner_texts() == ["fill", "3", "12.0 us"]
    assert tab.locator(".group .bar.measured").count() == len(
        {u["class"] for u in report["graphs"][0]["units"]}
    )


def test_rejections_come_the_largest_saving_first(opened: Open) -> None:
    report = report_of(60)
    tab = opened(report)
    tab.click(".unit[data-unit=norm_0] .name")
    texts = tab.locator("#panel .reasons li").all_inner_texts()
    savings = [
        edge["saving_us"] for edge in report["graphs"][0]["edges"] if "norm_0" in (edge["a"], edge["b"])
    ]
    assert len(texts) == len(savings) == 3
    assert "query_0" in texts[0] and "would save 3.50 us at most" in texts[0]
    shown = [float(re.search(r"(save|cost) ([\d.]+) us", t)[2]) for t in texts]  # pyright: ignore
    assert shown == pytest.approx(sorted(savings, reverse=True), abs=5e-3)


def test_an_edge_shows_its_rule_reason_and_saving(opened: Open) -> None:
    report = report_of(60)
    tab = opened(report)
    click_line(tab, "rotate_0 → attend_0")
    edge = next(e for e in report["graphs"][0]["edges"] if (e["a"], e["b"]) == ("rotate_0", "attend_0"))
    text = panel(tab)
    assert f"{edge['rule']}: {edge['reason']}" in text
    assert "would save 0.45 us" in text and "at most" not in text and "8.39 MB" in text
    assert tab.locator(".box.marked").count() == 2
    click_line(tab, "norm_0 → query_0")
    assert "would save 3.50 us at most" in panel(tab)


def test_edges_that_share_a_line_are_all_shown(opened: Open) -> None:
    tab = opened(report_of(60))
    tab.click(".title .name >> text=attention >> nth=0")
    click_line(tab, "norm_0 → ")
    assert "3 edges" in panel(tab)
    assert tab.locator("#panel article.edge").count() == 3


def test_a_search_finds_an_op_and_opens_what_hides_it(opened: Open) -> None:
    tab = opened(report_of(2000))
    box = tab.locator(".unit[data-unit=gelu_17]")
    assert box.count() == 0
    find(tab, "gelu_17_erf_2")
    chip = box.locator(".chip.found")
    assert chip.get_attribute("data-op") == "gelu_17_erf_2"
    assert tab.locator("#panel tr.found").get_attribute("data-op") == "gelu_17_erf_2"
    place, drawing = box.bounding_box(), tab.locator("#graph").bounding_box()
    assert drawing["x"] <= place["x"] and place["x"] + place["width"] <= drawing["x"] + drawing["width"]
    assert drawing["y"] <= place["y"] and place["y"] + place["height"] <= drawing["y"] + drawing["height"]
    assert tab.evaluate("document.activeElement.dataset.unit") == "gelu_17"


FINDABLE = (
    ("dropout_add_norm_1", "cluster", "dropout_add_norm_1"),
    ("value_0", "call", "value_0"),
    ("mlp.act gelu_1", "cluster", "gelu_1"),
    ("model.layers.1.attention", "module", "model.layers.1.attention"),
    ("gelu.py:16", "line", "gelu_0"),
    ("view_of_up_1", "op", "view_of_up_1"),
)


def test_a_search_finds_clusters_calls_modules_lines_and_views(opened: Open) -> None:
    tab = opened(report_of(100))
    for query, kind, heading in FINDABLE:
        tab.fill("#search", query)
        assert tab.locator("#results li .kind").first.inner_text() == kind
        tab.press("#search", "Enter")
        assert tab.locator("#panel h2").inner_text() == heading
        assert tab.locator(".box.marked").count() >= 1
    assert "Runs nothing of its own" in panel(tab)  # the view, whose reader is marked
    assert tab.locator(".box.marked").get_attribute("data-unit") == "up_1"
    tab.fill("#search", "nothing of this name")
    assert tab.locator("#results li").all_inner_texts() == ["nothing by that name"]


def test_a_row_of_the_missed_fusions_brings_the_pair(opened: Open) -> None:
    report = report_of(700)
    report["missed"][3] = {**report["missed"][3], "graph": "graph0.backward"}
    tab = opened(report)
    tab.click("#tab-missed")
    assert tab.locator("#panel tbody tr").count() == 10
    row = tab.locator("[data-missed='3']")
    edge = report["missed"][3]
    assert f"{edge['a']} + {edge['b']}" in row.inner_text() and edge["reason"] in row.inner_text()
    assert f"{edge['saving_us']:.2f} us\nat most" in row.inner_text()
    row.click()
    assert tab.locator("#graphs").input_value() == "1"
    assert tab.locator(".box.marked").evaluate_all("all => all.map(box => box.dataset.unit)") == [
        edge["a"],
        edge["b"],
    ]
    assert row.get_attribute("aria-selected") == "true"
    assert tab.locator(".line.lit").count() >= 1


def test_the_tables_and_bars_show_the_reports_figures(opened: Open) -> None:
    report = report_of(200)
    tab = opened(report)
    rows = {row["class"]: row for row in report["movement"]["classes"]}
    bars = tab.evaluate(
        """() => [...document.querySelectorAll(".chart > .group")].slice(2).map(group => {
            const bars = [...group.querySelectorAll(".bar i")];
            return [group.innerText.split("\\n")[0], ...bars.map(bar => parseFloat(bar.style.width))];
        })"""
    )
    assert {name for name, *_ in bars} == {name for name, row in rows.items() if row["us_before"] > 0}
    most = max(max(row["us_before"], row["us_after"]) for row in rows.values())
    for name, before, after in bars:
        assert before == pytest.approx(72 * rows[name]["us_before"] / most, abs=0.01)
        assert after == pytest.approx(72 * rows[name]["us_after"] / most, abs=0.01)
    tab.click("#tab-movement")
    cells = tab.locator(".movement tbody tr").first.locator("td").all_inner_texts()
    first = report["movement"]["classes"][0]
    assert cells[0] == first["class"] and cells[1] == f"{first['calls']} →\n{first['units']}"
    assert cells[-1] == "55% →\n70%" and cells[-3] == f"{100 * first['flop_share']:.1f}%"


def test_modules_open_and_close(opened: Open) -> None:
    tab = opened(report_of(100))
    boxes = tab.locator(".box")
    before = boxes.count()
    tab.click(".title .name >> text=attention >> nth=0")
    assert boxes.count() == before - 6  # its title stays as the closed box
    assert tab.locator("#panel h2").inner_text() == "model.layers.0.attention"
    tab.click(".module .name >> text=attention")
    assert boxes.count() == before
    tab.select_option("#graphs", label="graph0.backward")
    tab.click("[data-do=close]")
    assert boxes.count() < before


def test_the_legend_shows_a_class_alone(opened: Open) -> None:
    tab = opened(report_of(60))
    faint = "all => all.filter(e => getComputedStyle(e).opacity < 1).map(e => e.dataset.class)"
    for _ in range(2):  # pressed, and pressed again
        assert tab.locator(".unit").evaluate_all(faint) == []
        tab.click("#legend >> text=contraction")
        shown = set(tab.locator(".unit").evaluate_all(faint))
        assert shown == {"normalization", "element-wise", "random", "opaque"}
        tab.click("#legend >> text=contraction")


def test_everything_is_reached_by_keyboard(opened: Open) -> None:
    tab = opened(report_of(100))
    tab.keyboard.press("/")
    assert tab.evaluate("document.activeElement.id") == "search"
    tab.keyboard.type("attend_1")
    tab.keyboard.press("Enter")
    focused = "document.activeElement.getAttribute('aria-label')"
    assert tab.evaluate(focused).startswith("library attend_1,")
    tab.keyboard.press("ArrowDown")
    assert tab.evaluate(focused).startswith("library output_1,")
    tab.keyboard.press("Enter")
    assert tab.locator("#panel h2").inner_text() == "output_1"
    tab.keyboard.press("Escape")
    assert tab.locator(".box.marked").count() == 0
    tab.focus("#tab-overview")
    tab.keyboard.press("ArrowLeft")
    assert tab.evaluate("document.activeElement.id") == "tab-movement"
    width = "document.getElementById('side').getBoundingClientRect().width"
    narrow = tab.evaluate(width)
    tab.press("#divider", "ArrowLeft")
    assert tab.evaluate(width) == narrow + 40
    before = tab.locator(".box").count()
    tab.focus(".title >> nth=1")
    tab.keyboard.press("Enter")
    assert tab.locator(".box").count() < before
    assert tab.evaluate("document.activeElement.getAttribute('aria-expanded')") == "false"


def test_boxes_lie_apart_and_inside_their_frames(opened: Open) -> None:
    tab = opened(report_of(200))
    for _ in range(4):
        tab.click("[data-do=open]")
    tab.click("[data-do=fit]")
    places = "all => all.map(e => e.getBoundingClientRect()).map(r => [r.left, r.top, r.right, r.bottom])"
    boxes = tab.locator(".unit .back, .module .back").evaluate_all(places)
    frames = tab.locator(".frame").evaluate_all(places)
    assert len(boxes) > 50 and len(frames) > 10
    for i, (left, top, right, bottom) in enumerate(boxes):
        for other in boxes[:i]:
            assert right <= other[0] or other[2] <= left or bottom <= other[1] or other[3] <= top
    for left, top, right, bottom in [*boxes, *frames]:
        for frame in frames:
            apart = right <= frame[0] or frame[2] <= left or bottom <= frame[1] or frame[3] <= top
            inside = frame[0] <= left and right <= frame[2] and frame[1] <= top and bottom <= frame[3]
            around = left <= frame[0] and frame[2] <= right and top <= frame[1] and frame[3] <= bottom
            assert apart or inside or around
    assert tab.evaluate(THROUGH_BOXES) == []


def test_modules_that_wait_for_each_other_are_drawn(opened: Open) -> None:
    """layers -> a -> layers, a -> b -> a: a line of each goes back up, and round the boxes."""
    report = report_of(30)
    for name, module in (("norm_0", "a"), ("up_0", "a"), ("query_0", "b"), ("rotate_0", "a"), ("key_0", "b")):
        unit(report, name)["module"] = module
    tab = opened(report)
    assert tab.evaluate(THROUGH_BOXES) == []
    tab.click("[data-do=fit]")
    for module in ("a", "b"):
        tab.click(f".title .name >> text=▾ {module}")
    lines = tab.locator(".line .ink").evaluate_all(UPWARDS)
    assert sorted(lines) == ["norm_0 → value_0", "query_0 → rotate_0"]


# Elements that reach out of the window, apart from those in a row that scrolls sideways.
OUTSIDE = """() => {
    const row = (e) => e.closest(".wide, .tools, #legend, [role=tablist], pre");
    const scrolls = (e) => e && getComputedStyle(e).overflowX === "auto";
    return [...document.querySelectorAll("header *, .tools *, #legend *, #side *")]
        .filter((e) => e.getClientRects().length && !scrolls(row(e)))
        .filter((e) => e.getBoundingClientRect().right > innerWidth + 1 || e.getBoundingClientRect().x < -1)
        .map((e) => `${e.tagName} ${e.className} ${e.textContent.slice(0, 30)}`);
}"""


@pytest.mark.parametrize(("width", "height"), [(390, 844), (1400, 900)])
def test_the_page_fits_a_phone_and_a_desk(
    opened: Open, real: dict[str, Any], width: int, height: int
) -> None:
    long_names = report_of(200)
    for edge in long_names["missed"]:
        edge["a"] = "layer_norm_backward_and_several_more_operators"
    for report in (real, long_names):
        tab = opened(report, viewport={"width": width, "height": height})
        for name in ("overview", "missed", "movement", "selection"):
            tab.click(f"#tab-{name}")
            if name == "selection":
                find(tab, report["graphs"][0]["units"][1]["name"])
            assert tab.evaluate(OUTSIDE) == []
            assert tab.evaluate("document.documentElement.scrollWidth") == width
        panel_sizes = "[panel.clientWidth, panel.scrollWidth, graph.getBoundingClientRect().height]"
        shown, needed, drawing = tab.evaluate(f"(() => {panel_sizes})()")
        assert needed <= shown and drawing >= 0.25 * height
        assert tab.locator("#search").bounding_box()["width"] >= 0.35 * min(width, 800)


def test_a_family_of_missed_fusions_is_one_row(opened: Open, real: dict[str, Any]) -> None:
    report = report_of(60)
    report["missed"][0] |= {"times": 3, "others": 6}
    tab = opened(report)
    tab.click("#tab-missed")
    text = tab.locator("[data-missed='0']").inner_text()
    assert "and 2 alike elsewhere; or 6 other pairs like it instead" in text
    assert "instead" not in tab.locator("[data-missed='1']").inner_text()
    families = [
        [re.sub(r"_\d+\b", "", str(row[key])) for key in ("graph", "a", "b", "rule", "reason")]
        for row in real["missed"]
    ]
    assert len(families) > 3 and all(families.count(family) == 1 for family in families)


def test_hostile_texts_stay_texts(opened: Open) -> None:
    report = report_of(60, hostile=True)
    report["graphs"][0]["units"][1]["module"] = "__proto__.constructor"
    report["graphs"][0]["notes"] = {"__proto__": HOSTILE}
    tab = opened(report)
    assert tab.title() == f"{report['model']}: fusion report"
    tab.click(".unit.cluster >> nth=0")
    assert HOSTILE in tab.locator("#panel h2").text_content()
    assert tab.locator("#panel .source .python").first.text_content().endswith(HOSTILE)
    for name in ("overview", "missed", "movement", "selection"):
        tab.click(f"#tab-{name}")
        assert HOSTILE in tab.locator("#panel").text_content()
    find(tab, "up_0</script>")
    assert tab.evaluate("window.broken") is None
    assert tab.locator("img").count() == 0


def test_a_large_graph_is_ready_within_two_seconds(opened: Open) -> None:
    report = report_of(2000)
    assert len(report["graphs"][0]["ops"]) >= 2000
    times: list[float] = []
    for _ in range(3):
        tab = opened(report)
        times.append(float(tab.evaluate("document.documentElement.dataset.ready")))
        assert 10 <= tab.locator(".box").count() <= 60, "closed modules, not all 1300 units"
        tab.close()
    assert min(times) < 2000


def test_a_function_of_many_ops_and_no_modules_opens_too(opened: Open) -> None:
    report = report_of(2000)
    for each in report["graphs"][0]["units"]:
        each["module"] = ""
    tab = opened(report)
    assert 5 <= tab.locator(".box").count() <= 60
    find(tab, "gelu_17")
    assert tab.locator(".unit[data-unit=gelu_17].marked").count() == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_can_be_read(opened: Open, scheme: str) -> None:
    """WCAG 2's contrast of 4.5 between each text and what is behind it."""
    tab = opened(report_of(60), color_scheme=scheme)
    tab.click(".unit[data-unit=rotate_0] .name")
    ratios = tab.evaluate(CONTRAST)
    assert len(ratios) > 100
    assert [ratio for ratio in ratios if ratio[0] < 4.5] == []


def test_a_report_of_no_graph_says_so(opened: Open) -> None:
    report = {
        **report_of(1),
        "totals": {},
        "movement": {"classes": []},
        "graphs": [],
        "missed": [],
        "kernels": {},
    }
    tab = opened(report)
    assert "nothing to plan" in panel(tab)
    for name in ("selection", "missed", "movement"):
        tab.click(f"#tab-{name}")
    find(tab, "anything")


class Block(nn.Module):
    """[batch, 64] -> [batch, 64]; three modules, and a sum of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


@pytest.fixture(scope="module")
def real() -> dict[str, Any]:
    """Return the report of two blocks, forward and backward, as fc.explain has it."""
    model = nn.Sequential(Block(), Block())
    return fc.explain(model, torch.empty(512, 64, requires_grad=True)).json()


def keys_of(value: Any) -> Any:
    """The shape of plain data: keys, and below them those of the row of each list that says most."""
    if isinstance(value, dict):
        return {key: keys_of(inner) for key, inner in value.items() if key not in ("kernels", "notes")}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [keys_of(max(value, key=lambda row: sum(v is not None for v in row.values())))]
    return None


def test_the_made_up_report_has_the_keys_of_a_real_one(real: dict[str, Any]) -> None:
    assert keys_of(report_of(60)) == keys_of(real)


def test_a_real_report_is_drawn_with_all_its_units(opened: Open, real: dict[str, Any]) -> None:
    tab = opened(real)
    for number, graph in enumerate(real["graphs"]):
        tab.select_option("#graphs", str(number))
        for _ in range(3):
            tab.click("[data-do=open]")
        drawn = tab.locator(".unit").evaluate_all("all => all.map(box => box.dataset.unit)")
        assert sorted(drawn) == sorted(unit["name"] for unit in graph["units"])
        cluster = next(unit for unit in graph["units"] if unit["sort"] == "cluster")
        find(tab, cluster["name"])
        assert tab.locator("pre.kernel").text_content() == real["kernels"][cluster["kernel"]]
        assert cluster["why"] in panel(tab)
        pairs = {(edge["a"], edge["b"]) for edge in graph["edges"]}
        lines = tab.evaluate(
            "[...document.querySelectorAll('.line')].flatMap(l => l.report).map(e => [e.a, e.b])"
        )
        assert pairs & {tuple(line) for line in lines}
