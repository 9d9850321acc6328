"""The views of the bar: a long list of models, logs, and the server itself, in a real browser."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import pytest

from tests.support.models import make_model
from tests.support.servers import FREE_PORTS, Running
from tests.ui.looking import expect, look, register
from tests.ui.test_page import _axe, _check

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
def served(browser: Any, start: Callable[..., Running]) -> Running:
    return start(["echo.mar", *FREE_PORTS])


def with_models(page: Any, rates: Mapping[str, float], idle: int = 0) -> None:
    """Let the server's state have models of these rates, and others without workers."""

    def copies(state: dict[str, Any]) -> list[dict[str, Any]]:
        (model,) = state["models"]
        (version,) = model["versions"]
        (worker,) = version["workers"]
        models = []
        for place, (name, rate) in enumerate(rates.items()):
            point = [
                state["newest"],
                rate,
                rate / 10 if place % 2 else 0,
                0.001,
                0.001 * (place + 1),
                0,
                0,
                0,
                None,
                None,
            ]
            own = {
                "workers": [worker | {"memory": (place + 1) << 20, "device": f"cuda:{place}"}],
                "points": [point],
            }
            models.append(model | {"name": name, "versions": [version | own]})
        none = version | {"workers": [], "state": "idle", "points": []}
        return models + [
            model | {"name": f"idle{place}", "versions": [none]} for place in range(idle)
        ]

    def answer(route: Any) -> None:
        state = route.fetch().json()
        route.fulfill(json=state | {"models": copies(state)})

    page.route("**/ui/api/state*", answer)


def rows(page: Any) -> Any:
    return page.get_by_role("region", name="Models", exact=True).locator("tbody tr th.name")


def is_as_wide_as_its_window(page: Any) -> bool:
    return bool(page.evaluate("document.documentElement.scrollWidth <= innerWidth"))


def test_the_bar_names_the_views_and_marks_the_one_that_is_shown(
    page: Any, served: Running
) -> None:
    look(page, served)
    bar = page.get_by_role("navigation", name="Views")
    expect(bar.get_by_role("link")).to_have_text(["Models", "Jobs", "Logs", "Server"])
    for name in ("Jobs", "Logs", "Server", "Models"):
        bar.get_by_role("link", name=name).press("Enter")
        expect(page.get_by_role("heading", name=name, level=1)).to_be_visible()
        expect(bar.locator("[aria-current=page]")).to_have_text([name])
        assert page.title() == f"{name} · tsx"
    look(page, served, "model/echo/overview")
    expect(bar.locator("[aria-current=true]")).to_have_text(["Models"])
    look(page, served, "nonsense")
    expect(page.get_by_role("heading", name="This page does not exist")).to_be_visible()
    expect(bar.locator("[aria-current]")).to_have_count(0)


def test_models_are_sorted_by_any_column_requests_first(page: Any, served: Running) -> None:
    with_models(page, {"b": 5, "a": 50, "m10": 0.5, "m9": 20})
    look(page, served)
    expect(rows(page)).to_have_text(["a", "m9", "b", "m10"])
    top = [
        page.locator(where).first.bounding_box()["y"] for where in (".stats", ".charts", ".sorts")
    ]
    assert top == sorted(top)
    orders = {
        "Model": ["a", "b", "m9", "m10"],  # numbers in names count as numbers
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
        first = "ascending" if column in ("Model", "State", "Version", "Device") else "descending"
        expect(header).to_have_attribute("aria-sort", first)
        expect(page.locator("[aria-sort]")).to_have_count(1)
    page.get_by_role("columnheader", name="Requests/s").get_by_role("button").press("Enter")
    expect(rows(page)).to_have_text(["m10", "b", "m9", "a"])
    look(page, served, "jobs")
    look(page, served)
    expect(rows(page)).to_have_text(["m10", "b", "m9", "a"])  # the order of this visit is kept


def test_rows_keep_their_places_while_one_of_them_is_used(page: Any, served: Running) -> None:
    rates = {"a": 50.0, "b": 5.0}
    with_models(page, rates)
    look(page, served)
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


def test_models_without_workers_are_a_group_that_is_closed_until_it_is_wanted(
    page: Any, served: Running
) -> None:
    with_models(page, {"a": 1}, idle=47)
    look(page, served)
    group = page.get_by_role("button", name="47 without workers")
    expect(rows(page)).to_have_text(["a"])
    expect(group).to_have_attribute("aria-expanded", "false")
    group.press("Enter")
    expect(rows(page)).to_have_count(48)
    expect(group).to_have_attribute("aria-expanded", "true")
    group.press("Enter")
    expect(rows(page)).to_have_text(["a"])
    page.get_by_label("Filter").fill("idle4")
    expect(rows(page)).to_have_text(["idle4", *(f"idle4{place}" for place in range(7))])
    page.get_by_label("Filter").fill("")
    expect(rows(page)).to_have_text(["a"])


@pytest.mark.parametrize("width", [1440, 390])
def test_a_row_is_one_line_whatever_its_name(page: Any, served: Running, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    with_models(page, {"a": 3, LONG: 2, MARKUP: 1}, idle=297)
    look(page, served)
    expect(rows(page)).to_have_text(["a", LONG, MARKUP])
    heights = {row.bounding_box()["height"] for row in page.locator("tr:has(th.name)").all()}
    assert max(heights) - min(heights) < 1.5  # rounded to the pixels of a border
    expect(page.get_by_role("link", name=LONG)).to_have_attribute("title", LONG)
    assert is_as_wide_as_its_window(page)
    page.get_by_role("button", name="297 without workers").click()
    expect(rows(page)).to_have_count(300)
    assert is_as_wide_as_its_window(page)
    _check(_axe(), page, f"300 models at {width}")
    for where in (f"model/{LONG}/overview", "logs", "server"):
        look(page, served, where)
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        assert is_as_wide_as_its_window(page), where


def test_logs_are_those_of_all_models_or_of_one(
    page: Any, served: Running, start: Callable[..., Running], store: Any
) -> None:
    for name in ("first", "second"):
        make_model(store / f"{name}.mar", PRINTING, name=name)
    server = start(["first.mar", "second.mar", *FREE_PORTS])
    with httpx.Client(base_url=server.address("predictions"), timeout=60) as client:
        client.post("/predictions/first", content=b"<b>one</b>")
        client.post("/predictions/second", content=b"two")
    look(page, server, "logs")
    log = page.get_by_role("log")
    expect(log).to_contain_text("<b>one</b>")
    expect(log).to_contain_text("two")
    page.get_by_label("Model", exact=True).select_option("second")
    expect(log).not_to_contain_text("one")
    expect(log).to_contain_text("two")
    page.get_by_label("Filter").fill("nowhere")
    expect(page.get_by_text("No line matches the filter.")).to_be_visible()
    page.get_by_label("Filter").fill("seen")
    log.get_by_role("link", name="second").click()
    expect(page.get_by_role("heading", name="second")).to_be_visible()
    expect(page.get_by_role("log")).to_contain_text("two")


def test_the_server_shows_what_it_is_and_its_settings_without_secrets(
    page: Any, start: Callable[..., Running]
) -> None:
    words = [
        "--set",
        "models.echo.batch_size=3",
        "--set",
        "otlp_endpoint=http://me:hunter2@127.0.0.1:9",
    ]
    server = start(["echo.mar", *words, *FREE_PORTS], management_token="hunter2", drain_timeout="7")
    look(page, server, "server")
    page.get_by_label("Management token").fill("hunter2")
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
    expect(settings.get_by_role("row", name="job_queue_size")).to_have_count(
        0
    )  # it has its default
    page.get_by_label("Show defaults too").check()
    expect(settings.get_by_role("row", name="job_queue_size")).to_be_visible()
    page.get_by_label("Filter").fill("drain")
    expect(settings.locator("tbody tr")).to_have_count(1)


def test_no_view_is_shown_without_the_token(page: Any, start: Callable[..., Running]) -> None:
    server = start(["echo.mar", *FREE_PORTS], management_token="right")
    dialog = page.get_by_role("dialog", name="This server requires a token")
    for view in ("logs", "server", "jobs"):
        look(page, server, view)
        expect(dialog).to_be_visible()
        expect(page.locator("main")).not_to_contain_text("echo")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_views_have_no_serious_finding_of_axe(page: Any, served: Running, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    for width in (1440, 390):
        page.set_viewport_size({"width": width, "height": 900})
        for view, words in (("", "ready"), ("logs", "is ready on"), ("server", "model_store")):
            look(page, served, view)
            expect(page.locator("main").get_by_text(words).first).to_be_visible()
            _check(_axe(), page, f"{view} at {width}")
            assert is_as_wide_as_its_window(page), view
            wide = "[...document.querySelectorAll('.scroll')].filter((table) => table.scrollWidth > table.clientWidth).length"
            assert page.evaluate(wide) == 0, f"a table of {view} is wider than {width} pixels"


def test_a_server_that_has_no_model_has_all_its_views(
    page: Any, start: Callable[..., Running]
) -> None:
    server = start([*FREE_PORTS])
    look(page, server)
    expect(page.get_by_text("Serve your first model")).to_be_visible()
    expect(page.get_by_role("region", name="Models", exact=True)).to_be_hidden()
    look(page, server, "logs")
    expect(page.get_by_role("log")).to_be_visible()
    with httpx.Client(base_url=server.address("models"), timeout=60) as client:
        register(client, "echo.mar")
    expect(page.get_by_role("log")).to_contain_text("is ready on")
    expect(page.get_by_label("Model", exact=True).locator("option")).to_have_text(
        ["all models", "echo"]
    )
