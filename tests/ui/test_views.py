"""The views in the page's navigation bar: models, logs and the server itself, in a real browser."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.models import make_model
from tests.support.servers import Running
from tests.ui.browser_helpers import (
    check_accessibility,
    check_width,
    click,
    expect,
    expect_heading,
    expect_text,
    fill,
    open_view,
    predict,
    register,
)

LONG = "long-" + "x" * 195
MARKUP = "<img src=x onerror=console.error(1)><b>"
PRINTING = """
def handle(data, context):
    if data is None:
        return None
    print("seen", data[0].get("body"))
    return ["ok"] * len(data)
"""


@pytest.fixture(scope="module")
def served(start: Callable[..., Running], store: Path) -> Running:
    for name in ("first", "second"):
        make_model(store / f"{name}.mar", PRINTING, name=name)
    return start("first.mar", "second.mar")


def with_models(page: Any, rates: Mapping[str, float], idle: int = 0) -> None:
    """Replace the server's models by some with these rates, and by others without workers."""

    def models_of(state: dict[str, Any]) -> list[dict[str, Any]]:
        model, *_ = state["models"]
        (version,) = model["versions"]
        (worker,) = version["workers"]
        models = []
        for index, (name, rate) in enumerate(rates.items()):
            failures, latency = rate / 10 if index % 2 else 0, 0.001 * (index + 1)
            point = [state["newest"], rate, failures, 0.001, latency, 0, 0, 0, None, None]
            busy = version | {
                "workers": [worker | {"memory": (index + 1) << 20, "device": f"cuda:{index}"}],
                "points": [point],
            }
            models.append(model | {"name": name, "versions": [busy]})
        unused = version | {"workers": [], "state": "idle", "points": []}
        names = [f"idle{number}" for number in range(idle)]
        return models + [model | {"name": name, "versions": [unused]} for name in names]

    def answer(route: Any) -> None:
        state = route.fetch().json()
        route.fulfill(json=state | {"models": models_of(state)})

    page.route("**/ui/api/state*", answer)


def rows(page: Any) -> Any:
    return page.get_by_role("region", name="Models", exact=True).locator("tbody tr th.name")


def test_the_bar_lists_the_views_and_marks_the_current_one(page: Any, served: Running) -> None:
    open_view(page, served)
    bar = page.get_by_role("navigation", name="Views")
    expect(bar.get_by_role("link")).to_have_text(["Models", "Jobs", "Logs", "Server"])
    for name in ("Jobs", "Logs", "Server", "Models"):
        bar.get_by_role("link", name=name).press("Enter")
        expect_heading(page, name, level=1)
        expect(bar.locator("[aria-current=page]")).to_have_text([name])
        assert page.title() == f"{name} · tsx"
    open_view(page, served, "model/first/overview")
    expect(bar.locator("[aria-current=true]")).to_have_text(["Models"])
    open_view(page, served, "nonsense")
    expect_heading(page, "This page does not exist")
    expect(bar.locator("[aria-current]")).to_have_count(0)


def test_models_are_sorted_by_any_column_for_the_whole_visit(page: Any, served: Running) -> None:
    with_models(page, {"b": 5, "a": 50, "m10": 0.5, "m9": 20})
    open_view(page, served)
    expect(rows(page)).to_have_text(["a", "m9", "b", "m10"])
    parts = (".stats", ".charts", ".sorts")
    tops = [page.locator(part).first.bounding_box()["y"] for part in parts]
    assert tops == sorted(tops)
    orders = {
        "Model": ["a", "b", "m9", "m10"],
        "Memory": ["m9", "m10", "a", "b"],
        "p99": ["m9", "m10", "a", "b"],
        "Device": ["b", "a", "m10", "m9"],
        "Errors": ["a", "m9", "b", "m10"],
        "State": ["a", "b", "m9", "m10"],
        "Workers": ["a", "b", "m9", "m10"],
        "Version": ["a", "b", "m9", "m10"],
        "Requests/s": ["a", "m9", "b", "m10"],
    }
    for column, order in orders.items():
        header = page.get_by_role("columnheader", name=column)
        header.get_by_role("button").press("Enter")
        expect(rows(page)).to_have_text(order)
        texts = ("Model", "State", "Version", "Device")
        direction = "ascending" if column in texts else "descending"
        expect(header).to_have_attribute("aria-sort", direction)
        expect(page.locator("[aria-sort]")).to_have_count(1)
    page.get_by_role("columnheader", name="Requests/s").get_by_role("button").press("Enter")
    expect(rows(page)).to_have_text(["m10", "b", "m9", "a"])
    open_view(page, served, "jobs")
    open_view(page, served)
    expect(rows(page)).to_have_text(["m10", "b", "m9", "a"])


def test_rows_keep_their_positions_while_one_is_in_use(page: Any, served: Running) -> None:
    rates = {"a": 50.0, "b": 5.0}
    with_models(page, rates)
    open_view(page, served)
    expect(rows(page)).to_have_text(["a", "b"])
    link = page.get_by_role("link", name="a", exact=True)
    link.focus()
    rates["b"] = 5000.0
    expect(page.get_by_role("row", name=re.compile("^b ")).locator("td.number").first).to_have_text(
        re.compile(r"\d,\d")
    )
    expect(rows(page)).to_have_text(["a", "b"])
    expect(link).to_be_focused()
    link.blur()
    expect(rows(page)).to_have_text(["b", "a"])


def test_models_without_workers_are_in_a_collapsed_group(page: Any, served: Running) -> None:
    with_models(page, {"a": 1}, idle=47)
    open_view(page, served)
    group = page.get_by_role("button", name="47 without workers")
    expect(rows(page)).to_have_text(["a"])
    expect(group).to_have_attribute("aria-expanded", "false")
    group.press("Enter")
    expect(rows(page)).to_have_count(48)
    expect(group).to_have_attribute("aria-expanded", "true")
    group.press("Enter")
    expect(rows(page)).to_have_text(["a"])
    fill(page, "Filter", "idle4")
    expect(rows(page)).to_have_text(["idle4", *(f"idle4{digit}" for digit in range(7))])
    fill(page, "Filter", "")
    expect(rows(page)).to_have_text(["a"])


def test_a_row_is_one_line_whatever_its_name(page: Any, served: Running) -> None:
    with_models(page, {"a": 3, LONG: 2, MARKUP: 1}, idle=47)
    open_view(page, served)
    for width in (1440, 390):
        page.set_viewport_size({"width": width, "height": 900})
        expect(rows(page)).to_have_text(["a", LONG, MARKUP])
        heights = {line.bounding_box()["height"] for line in page.locator("tr:has(th.name)").all()}
        assert max(heights) - min(heights) < 1.5, "rounded to the pixels of a border"
        expect(page.get_by_role("link", name=LONG)).to_have_attribute("title", LONG)
        check_width(page, f"models at {width}")
        click(page, "47 without workers")
        expect(rows(page)).to_have_count(50)
        check_width(page, f"50 models at {width}")
        check_accessibility(page, f"50 models at {width}", dark=False)
        click(page, "47 without workers")
    open_view(page, served, f"model/{LONG}/overview")
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    check_width(page, "a long name")


def test_logs_show_all_models_or_one(page: Any, served: Running) -> None:
    predict(served, "first", content=b"<b>one</b>")
    predict(served, "second", content=b"two")
    open_view(page, served, "logs")
    log = page.get_by_role("log")
    expect(log).to_contain_text("<b>one</b>")
    expect(log).to_contain_text("two")
    page.get_by_label("Model", exact=True).select_option("second")
    expect(log).not_to_contain_text("one")
    expect(log).to_contain_text("two")
    fill(page, "Filter", "nowhere")
    expect_text(page, "No line matches the filter.")
    fill(page, "Filter", "seen")
    log.get_by_role("link", name="second").click()
    expect_heading(page, "second")
    expect(page.get_by_role("log")).to_contain_text("two")


def test_the_server_view_shows_figures_and_settings_without_secrets(
    page: Any, start: Callable[..., Running]
) -> None:
    server = start(
        *("echo.mar", "--set", "models.echo.batch_size=3"),
        *("--set", "otlp_endpoint=http://me:hunter2@127.0.0.1:9"),
        management_token="hunter2",
        drain_timeout=7,
    )
    open_view(page, server, "server")
    fill(page, "Management token", "hunter2")
    page.keyboard.press("Enter")
    tiles = page.locator(".tile")
    expect(tiles.locator("dt")).to_have_text(
        ["Version", "Uptime", "Memory of the server", "Memory of workers", "Free memory"]
    )
    expect(tiles.locator("dd").nth(1)).to_have_text(re.compile(r"\d+ s"))
    expect(tiles.locator("dd").nth(2)).to_have_text(re.compile(r"\d+ MiB"))
    settings = page.get_by_role("region", name="Settings", exact=True).last
    for name, value in (
        ("drain_timeout", "7"),
        ("models.echo.batch_size", "3"),
        ("management_token", "(hidden)"),
    ):
        expect(settings.get_by_role("row", name=name).locator("td").first).to_have_text(value)
    expect(settings.get_by_role("row", name="otlp_endpoint").locator("td").first).to_have_text(
        "http://***@127.0.0.1:9"
    )
    assert "hunter2" not in page.content()
    # Settings with default values are hidden.
    expect(settings.get_by_role("row", name="job_queue_size")).to_have_count(0)
    page.get_by_label("Show defaults too").check()
    expect(settings.get_by_role("row", name="job_queue_size")).to_be_visible()
    fill(page, "Filter", "drain")
    expect(settings.locator("tbody tr")).to_have_count(1)


def test_the_views_have_no_serious_accessibility_findings(page: Any, served: Running) -> None:
    for width, dark in ((1440, True), (390, False)):
        page.set_viewport_size({"width": width, "height": 900})
        for view, text in (("", "ready"), ("logs", "is ready on"), ("server", "model_store")):
            open_view(page, served, view)
            expect(page.locator("main").get_by_text(text).first).to_be_visible()
            check_accessibility(page, f"{view} at {width}", dark=dark)
            check_width(page, f"{view} at {width}")


def test_a_server_without_models_has_all_its_views(
    page: Any, empty_server: Running, management: httpx.Client
) -> None:
    open_view(page, empty_server)
    expect_text(page, "Serve your first model")
    expect(page.get_by_role("region", name="Models", exact=True)).to_be_hidden()
    open_view(page, empty_server, "logs")
    expect(page.get_by_role("log")).to_be_visible()
    register(management, "echo.mar")
    expect(page.get_by_role("log")).to_contain_text("is ready on")
    expect(page.get_by_label("Model", exact=True).locator("option")).to_have_text(
        ["all models", "echo"]
    )
