"""The web page in a real browser: actions of a user and what the page then shows."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.models import make_model
from tests.support.servers import Running
from tests.support.typed_models import TYPED
from tests.ui.browser_helpers import (
    PNG,
    check_accessibility,
    check_width,
    click,
    expect,
    expect_heading,
    expect_text,
    fill,
    open_view,
    png,
    predict,
    register,
    row,
    run_snippet,
    send_json,
    snippets_of,
)

FORMED = """
class Formed:
    form, forms_passed_over = "bf16", ("openvino-int8: it was built for cuda",)

    def initialize(self, context):
        pass

    def handle(self, data, context):
        return ["" for _ in data]
"""


@pytest.fixture(scope="module")
def served(start: Callable[..., Running]) -> Running:
    """Start a server with `echo` and two versions of `luminance`, for tests that change nothing."""
    server = start("echo.mar", "luminance.mar")
    with httpx.Client(base_url=server.address("models"), timeout=60) as client:
        register(client, "luminance2.mar")
    return server


@pytest.mark.nightly
def test_a_version_shows_its_form_and_the_unused_ones(
    page: Any, empty_server: Running, management: httpx.Client, store: Path
) -> None:
    make_model(store / "formed.mar", FORMED)
    register(management, "formed.mar")
    open_view(page, empty_server, "model/formed/overview")
    expect_text(page, "form bf16")
    expect_text(page, "Forms that are not used: openvino-int8: it was built for cuda")


def test_a_model_is_registered_tried_and_removed_only_by_keyboard(
    page: Any, empty_server: Running, management: httpx.Client
) -> None:
    open_view(page, empty_server)
    expect_text(page, "No model is registered")
    page.get_by_role("button", name="Register a model").focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="Register a model")
    expect(dialog.get_by_label("Archive")).to_be_focused()
    page.keyboard.type("luminance.ma")
    page.keyboard.press("Enter")
    expect(dialog.get_by_role("alert")).to_contain_text("Model not found")
    # Only the dialog reports the problem, not the page behind it.
    expect(page.get_by_role("button", name="Dismiss this message")).to_have_count(0)
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Tab")
    dialog.get_by_label("Archive").focus()
    page.keyboard.press("End")
    page.keyboard.type("r")
    page.keyboard.press("Enter")
    expect(
        page.get_by_role("status").get_by_text("registered with 1 initial workers")
    ).to_be_visible()
    expect(dialog).to_have_count(0)
    expect(row(page, "luminance").get_by_text("ready", exact=True)).to_be_visible()
    row(page, "luminance").get_by_role("link").focus()
    page.keyboard.press("Enter")
    expect_heading(page, "luminance")
    page.get_by_role("link", name="Overview").press("Enter")
    page.get_by_role("button", name="Unregister").focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    expect(dialog).to_be_visible()
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    assert management.get("/models/luminance").status_code == 200
    page.keyboard.press("Enter")
    page.get_by_role("dialog").get_by_role("button", name="Unregister").press("Enter")
    expect_text(page, "This model is no longer registered")
    assert management.get("/models/luminance").status_code == 404


def test_an_image_is_predicted_and_every_snippet_reproduces_it(
    page: Any, served: Running, tmp_path: Path
) -> None:
    (tmp_path / "light.png").write_bytes(png(204))
    open_view(page, served, "model/luminance/try")
    expect(page.get_by_role("radio", name="Image")).to_be_checked()
    page.get_by_label("Image", exact=True).last.set_input_files(tmp_path / "light.png")
    expect(page.get_by_alt_text("The image to be sent")).to_be_visible()
    click(page, "Send")
    bars = page.get_by_role("list", name="Labels").get_by_role("listitem")
    expect(bars).to_have_count(2)
    expect(bars.first).to_contain_text("light")
    expect(bars.first).to_contain_text("80.0 %")
    expect(page.get_by_role("list", name="Where the time went")).to_contain_text("inference")
    expect_text(page, re.compile(r"200 OK · .*s · .* B$"))
    tops = [
        page.get_by_role("list", name=name).bounding_box()["y"]
        for name in ("Labels", "Where the time went")
    ]
    assert tops == sorted(tops)
    for tool, snippet in snippets_of(page).items():
        answer = json.loads(run_snippet(tool, snippet, tmp_path).stdout)
        assert answer["light"] == pytest.approx(0.8), tool
    page.get_by_role("tab", name="curl").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="requests")).to_be_focused()
    page.keyboard.press("ArrowLeft")
    click(page, "Copy the line for curl")
    expect(page.get_by_role("button", name="Copy the line for curl")).to_have_text("Copied")
    assert (
        page.evaluate("navigator.clipboard.readText()")
        == page.locator("pre[data-for=curl]").inner_text()
    )


def test_an_image_may_be_dropped_or_taken_by_the_camera(page: Any, served: Running) -> None:
    open_view(page, served, "model/luminance/try")
    click(page, "Use camera")
    click(page, "Take picture")
    expect_text(page, "picture.jpg")
    click(page, "Send")
    expect(page.get_by_role("list", name="Labels")).to_be_visible()
    transfer = page.evaluate_handle(
        """(bytes) => {
            const transfer = new DataTransfer();
            transfer.items.add(new File([new Uint8Array(bytes)], 'dropped.png', { type: 'image/png' }));
            return transfer;
        }""",
        list(png(0)),
    )
    page.locator(".drop:visible").dispatch_event("drop", {"dataTransfer": transfer})
    expect_text(page, "dropped.png")
    click(page, "Send")
    expect(page.get_by_role("list", name="Labels").get_by_role("listitem").first).to_contain_text(
        "dark"
    )


def test_responses_are_displayed_by_their_type(page: Any, served: Running) -> None:
    open_view(page, served, "model/echo/try")
    expect(page.get_by_role("radio", name="JSON")).to_be_checked()
    send_json(page, {"cat": 0.75, "dog": 0.25})
    expect(page.get_by_role("list", name="Labels").get_by_role("listitem").first).to_contain_text(
        "75.0 %"
    )
    send_json(page, [{"cat": [1, 2, 30, 40], "score": 0.9}])
    expect(page.get_by_role("region", name="Detected objects")).to_contain_text("1, 2, 30, 40")
    send_json(page, [[[row % 2, 0.5] for _ in range(16)] for row in range(16)])
    expect(page.get_by_role("img", name="The class of each pixel")).to_be_visible()
    # The response begins like a mask.
    send_json(page, [[[0, 0.5]] * 16, *[[None] * 16] * 15])
    expect(page.locator("details.raw pre")).to_contain_text("null")
    send_json(page, [{"name": "a", "size": 1}, {"name": "b", "tags": ["x"]}])
    expect(
        page.get_by_role("region", name="The answer as a table").get_by_role("row")
    ).to_have_count(3)
    send_json(page, {"deep": {"er": [1, "<img src=x onerror=alert(1)>"]}})
    expect(page.locator("details.raw pre")).to_contain_text("<img src=x onerror=alert(1)>")
    page.get_by_label("JSON", exact=True).last.fill('{"a": ')
    click(page, "Send")
    expect(page.get_by_text("Not JSON yet")).to_have_count(1)
    expect(page.get_by_role("alert").get_by_text("Correct the JSON first.")).to_be_visible()


def test_boxes_are_drawn_over_the_sent_image(page: Any, served: Running) -> None:
    """A detector's response is drawn over the request's image."""
    open_view(page, served)
    box = page.evaluate(
        """async () => {
            const { answerView } = await import('./answerview.js');
            const image = { url: 'icon.svg', width: 32, height: 32 };
            const value = [{ cat: [2, 3, 20, 30], score: 0.9 }];
            const body = new Blob([JSON.stringify(value)]);
            const view = answerView({ body, type: 'application/json', value, text: JSON.stringify(value) }, image);
            const rect = view.querySelector('svg rect');
            return ['x', 'y', 'width', 'height'].map((name) => Number(rect.getAttribute(name)));
        }"""
    )
    assert box == [2, 3, 18, 27]


def test_a_failure_is_shown_in_the_playground_and_kept_with_its_traceback(
    page: Any, served: Running
) -> None:
    open_view(page, served, "model/echo/try")
    send_json(page, "fail")
    expect_text(page, "the echo is broken")
    request = page.locator(".answer").get_by_text(re.compile("^request ")).inner_text()
    page.get_by_role("link", name="Show the traceback").click()
    summary = page.locator(".errors summary")
    expect(summary).to_contain_text("RuntimeError: the echo is broken")
    expect(summary).to_be_focused()
    expect(page.locator(".errors pre")).to_contain_text("handler.py")
    expect(page.locator(".errors").get_by_text(request, exact=True)).to_be_visible()
    open_view(page, served, "model/echo/errors/no-such-request")
    expect_text(page, "The server has no traceback of request no-such-request")


def test_a_failing_model_is_red_with_its_error_rate_and_last_error(
    page: Any, empty_server: Running, management: httpx.Client
) -> None:
    register(management, "echo.mar")
    open_view(page, empty_server)
    # The trend has points as soon as requests are counted per second.
    expect(row(page, "echo").locator("svg .line")).to_have_attribute("d", re.compile("M"))
    for body in ("well", "fail", "fail", "fail"):
        predict(empty_server, "echo", json=body)
    link = row(page, "echo").get_by_role("link", name=re.compile("^7[45].* % errors$"))
    expect(link).to_have_attribute(
        "title",
        "of the requests of the last 10 minutes; last error: RuntimeError: the echo is broken",
    )
    expect(link).to_have_class("chip bad")
    expect(row(page, "echo").get_by_text("ready", exact=True)).to_have_class("chip off")
    link.click()
    expect(page.locator(".errors summary")).to_be_focused()
    expect(page.locator(".errors pre")).to_contain_text("handler.py")
    expect_text(page, "Last error: RuntimeError: the echo is broken")
    page.get_by_role("link", name="Overview").click()
    card = page.get_by_role("region", name="Version 1.0")
    expect(card.get_by_role("link", name=re.compile("^7[45].* % errors$"))).to_be_visible()


def test_a_model_with_a_signature_has_a_form_of_its_fields(
    page: Any, empty_server: Running, management: httpx.Client, store: Path, tmp_path: Path
) -> None:
    make_model(store / "sentiment.mar", TYPED)
    register(management, "sentiment.mar")
    open_view(page, empty_server, "model/sentiment/try")
    expect(page.get_by_role("radio", name="Fields")).to_be_checked()
    text = page.get_by_role("textbox", name="text *")
    # The example of the signature is filled in, and the defaults of the other fields.
    expect(text).to_have_value("what a nice day")
    expect(page.get_by_role("spinbutton", name="top")).to_have_value("2")
    expect(page.get_by_role("combobox", name="language")).to_have_value('"en"')
    expect(page.get_by_role("textbox", name="tags")).to_have_value("[]")
    check_accessibility(page, "fields")

    # Only with the keyboard: change fields, and send.
    text.focus()
    page.keyboard.press("ControlOrMeta+a")
    page.keyboard.type("so nice")
    for keys in ("Tab", "3", "Tab", "0.5", "Tab", "Space", "Tab", "d", "Tab"):
        getattr(page.keyboard, "type" if keys in ("3", "0.5", "d") else "press")(keys)
    page.keyboard.press("ControlOrMeta+a")
    page.keyboard.type("[1")
    page.keyboard.press("ControlOrMeta+Enter")
    expect(page.get_by_role("alert")).to_have_text("Correct tags first.")
    page.keyboard.type("]")
    (tmp_path / "a.png").write_bytes(b"\x89P")
    page.get_by_role("button", name="image", exact=True).set_input_files(tmp_path / "a.png")
    click(page, "Send")
    given = {"top": 3, "scale": 0.5, "exact": True, "language": "de", "tags": [1]}
    expected = given | {"text": "so nice", "image": "iVA="}
    expect(page.locator(".answer")).to_contain_text("positive")
    snippet = snippets_of(page)["curl"]
    assert json.loads(run_snippet("curl", snippet, tmp_path).stdout)["given"] == expected

    # The other way round: what JSON has is in the fields, also what no field has.
    page.get_by_role("radio", name="JSON").check()
    shown = page.get_by_label("JSON", exact=True).last
    expect(shown).to_have_value(re.compile('"text": "so nice"'))
    assert json.loads(shown.input_value()) == expected
    shown.fill('{"text": 1, "top": "two", "other": null}')
    click(page, "Send")
    expect(page.locator(".answer .problem")).to_contain_text(
        "body.top: Input should be a valid integer"
    )
    shown.fill('{"text": "bad", "tags": "none", "other": null}')
    page.get_by_role("radio", name="Fields").check()
    expect(text).to_have_value("bad")
    click(page, "Send")
    expect(page.locator(".field .problem", has_text="valid list")).to_be_visible()
    tags = page.get_by_role("textbox", name="tags")
    expect(tags).to_be_focused()
    expect(tags).to_have_attribute("aria-invalid", "true")
    expect(tags).to_have_accessible_description(re.compile("Input should be a valid list"))
    check_accessibility(page, "wrong fields")
    tags.fill("[]")
    click(page, "Send")
    expect(tags).to_have_attribute("aria-invalid", "false")
    page.get_by_role("button", name="example.json").click()
    expect(text).to_have_value("what a nice day")
    page.set_viewport_size({"width": 360, "height": 740})
    check_width(page, "fields")


@pytest.mark.nightly
def test_a_model_shows_why_it_was_not_replaced_until_it_is(
    page: Any, empty_server: Running, management: httpx.Client, store: Path
) -> None:
    register(management, "echo.mar")
    make_model(store / "fault.mar", "raise RuntimeError('no')\n", name="echo")
    open_view(page, empty_server, "model/echo")
    problem = page.locator("main .problem").first
    for file in ("fault.mar", "echo.mar"):
        management.post("/models", params={"url": file, "replace": "true"})
        if file == "fault.mar":
            expect(problem).to_contain_text("has not taken its place")
            expect(problem).to_contain_text("Traceback")
        else:
            expect(problem).to_be_hidden()


@pytest.mark.nightly
def test_the_api_documentation_loads_no_external_files(page: Any, served: Running) -> None:
    open_view(page, served)
    expect(page.get_by_role("link", name="API")).to_have_attribute(
        "href", f"{served.address('predictions')}/docs"
    )
    help_links = page.get_by_role("navigation", name="Help").get_by_role("link")
    expect(help_links).to_have_count(1)
    page.get_by_role("link", name="API").click()
    expect_heading(page, re.compile("^tsx inference"))
    operation = page.locator("#operations-inference-post_predictions_model")
    operation.locator(".opblock-summary-control").click()
    operation.get_by_role("button", name="Try it out").click()
    operation.get_by_placeholder("model").fill("echo")
    operation.get_by_label("Request content type").select_option("text/plain")
    operation.locator("textarea").fill("hello there")
    operation.get_by_role("button", name="Execute").click()
    expect(operation.locator(".live-responses-table")).to_contain_text("hello there")
    management = served.address("models")
    assert "swagger" in httpx.get(f"{management}/docs", follow_redirects=True).text
    assert httpx.get(f"{management}/api-description").json()["info"]["title"] == "tsx management"


def test_errors_are_grouped_by_exception_with_the_newest_first(
    page: Any, empty_server: Running, management: httpx.Client
) -> None:
    register(management, "echo.mar")
    open_view(page, empty_server, "model/echo/errors")
    expect_text(page, "No errors so far.")
    for text in ("fail otherwise", "fail", "fail", "fail with 1", "fail with 2"):
        predict(empty_server, "echo", json=text)
    summary = page.locator(".errors summary")
    headlines = ("2 .*ValueError: fail with 2handler.py:", "2 .*broken", "1 .*lost")
    expect(summary).to_have_text([re.compile(headline) for headline in headlines])
    summary.first.click()
    page.get_by_label("Error of this kind").first.select_option(index=1)
    expect(page.locator(".errors pre").first).to_contain_text("ValueError: fail with 1")


def test_an_unknown_address_is_reported_and_the_page_keeps_polling(
    page: Any, served: Running
) -> None:
    for route in ("model/%E0", "model", "model/echo/nonsense", "nonsense"):
        open_view(page, served, route)
        expect_heading(page, "This page does not exist")
        expect(page.locator("main")).to_contain_text(route)
        # The page still polls the state.
        with page.expect_response(re.compile("ui/api/state")):
            pass
    page.get_by_role("link", name="All models").click()
    expect_heading(page, "Models")


def test_the_skip_link_leads_to_the_content_and_not_to_another_view(
    page: Any, served: Running
) -> None:
    open_view(page, served, "model/echo")
    page.get_by_role("link", name="Skip to the content").press("Enter")
    expect(page.locator("main")).to_be_focused()
    expect_heading(page, "echo")


def test_a_server_without_models_shows_commands_and_registers_an_archive(
    page: Any, empty_server: Running, management: httpx.Client, store: Path
) -> None:
    open_view(page, empty_server)
    steps = page.get_by_role("list").locator("pre")
    address = empty_server.address("models")
    expect(steps).to_have_text(
        [
            f"tsx archive model.pt --output {store}",
            f"tsx models register model.mar --workers 1 --url {address}",
            f"tsx predict model --sample --url {empty_server.address('predictions')}",
        ]
    )
    click(page, "Copy the command: Pack a model")
    assert page.evaluate("navigator.clipboard.readText()") == steps.first.inner_text()
    # There is no upload, since a browser cannot write into the model store.
    expect(page.locator("input[type=file], .drop")).to_have_count(0)
    click(page, "Register a model")
    dialog = page.get_by_role("dialog", name="Register a model")
    fill(dialog, "Archive", "luminance.mar")
    click(dialog, "Register", exact=True)
    expect(row(page, "luminance")).to_be_visible()
    expect(page.get_by_text("No model is registered")).to_be_hidden()


def test_a_server_without_a_model_store_shows_the_serve_command(page: Any, served: Running) -> None:
    def remove_store(route: Any) -> None:
        state = route.fetch().json()
        route.fulfill(json=state | {"models": [], "server": state["server"] | {"store": None}})

    page.route("**/ui/api/state*", remove_store)
    open_view(page, served)
    commands = ["tsx archive model.pt", "tsx serve model.mar", "tsx predict model --sample"]
    expect(page.get_by_role("list").locator("pre")).to_have_text(commands)
    page.unroute_all(behavior="wait")


def test_a_missed_latency_target_and_a_reply_cache_are_described(
    page: Any, served: Running
) -> None:
    def add_figures(route: Any) -> None:
        state = route.fetch().json()
        version, *_ = next(
            model["versions"] for model in state["models"] if model["name"] == "luminance"
        )
        slo = {
            "target": "p99<10ms",
            "batchSize": 2,
            "attained": 0,
            "missed": 20,
            "refused": 3,
            "attainment": 0.0,
            "budgetLeft": -99.0,
        }
        cache = {
            "entries": 5,
            "size": 2560,
            "maxSize": 1 << 20,
            "hits": 55,
            "misses": 5,
            "evictions": 0,
            "hitRatio": 55 / 60,
        }
        version |= {"slo": slo, "cache": cache}
        route.fulfill(json=state)

    page.route("**/ui/api/state*", add_figures)
    open_view(page, served, "model/luminance/overview")
    expect(page.get_by_text("p99<10ms")).to_have_text(
        "Target p99<10ms: kept for 0.00 % of the requests of the last 5 minutes; the error budget of the last hour is used up: "
        "100 times as many misses as it allows; 3 refused on arrival; batches of up to 2"
    )
    hits = "answered 91.7 % of the requests (55 hits, 5 misses)"
    expect(page.get_by_text("Reply cache")).to_have_text(
        f"Reply cache: {hits}; it holds 5, 2.5 KiB of 1.0 MiB"
    )
    page.unroute_all(behavior="wait")


@contextmanager
def repeated_requests(send: Callable[[], object]) -> Iterator[None]:
    """Send requests in a thread until the block ends."""
    end = threading.Event()

    def repeat() -> None:
        while not end.wait(0.02):
            send()

    with ThreadPoolExecutor(1) as pool:
        task = pool.submit(repeat)
        try:
            yield
        finally:
            end.set()
        task.result()


def test_the_overview_begins_with_the_state_and_its_trends(page: Any, served: Running) -> None:
    open_view(page, served, "model/luminance/overview")
    state = page.locator(".stat")
    expect(state.locator("dt")).to_have_text(
        ["Requests/s", "Errors", "p50", "p99", "Queue", "Batch fill"]
    )
    half = re.compile(r"[3-7]\d(\.\d+)? %")

    def send_good_and_bad() -> None:
        predict(served, "luminance", content=png(10), headers=PNG)
        predict(served, "luminance", content=b"no picture", headers=PNG)

    with repeated_requests(send_good_and_bad):
        expect(state.nth(1)).to_contain_text(half)
    expect(state.nth(1)).to_have_attribute("data-tone", "bad")
    expect(state.nth(3)).to_contain_text(re.compile("(ms|µs)"))
    expect(state.locator("path.line")).to_have_count(6)
    expect(state.nth(0).locator("path.line")).to_have_attribute("d", re.compile("M.*L"))
    expect(state.nth(5)).to_contain_text("batch size 1")
    top = [
        page.locator(selector).first.bounding_box()["y"]
        for selector in (".stats", ".charts", ".versions")
    ]
    assert top == sorted(top)


def test_charts_fit_their_data_and_share_one_crosshair(page: Any, served: Running) -> None:
    """Ten points fill the plot, whatever time they span."""
    open_view(page, served)
    expect_heading(page, "Models")
    chart_state = page.evaluate(
        """async () => {
            const { chart, stepOf } = await import('./chart.js');
            const { live } = await import('./live.js');
            const point = (_, at) => ({ number: 991 + at, one: at < 5 ? 8 : 12.5, two: at === 3 ? null : 2.5 });
            const points = Array.from({ length: 10 }, point);
            const lines = ['one', 'two'].map((name, color) => ({ name, color, points, value: (point) => point[name] }));
            live.base = 1000;
            const [plain, piled] = [chart('Plain', String), chart('Piled', String, { stacked: true })];
            for (const drawing of [plain, piled]) {
                drawing.node.style.width = '600px';
                document.body.append(drawing.node);
                drawing.update(lines, 1000, 600);
            }
            await new Promise((go) => setTimeout(go, 100));
            const of = (each, where) => [...each.node.querySelectorAll(where)];
            const plot = plain.node.querySelector('svg').getBoundingClientRect();
            const move = new PointerEvent('pointermove', { clientX: plot.left + plot.width - 10, clientY: plot.top + 50 });
            const legends = () => [plain, piled].map((each) => each.node.querySelector('.legend').textContent);
            const means = legends();
            plain.node.querySelector('svg').dispatchEvent(move);
            const drawn = {
                steps: [113, 220, 0.3, 2].map((most) => stepOf(most)).concat(stepOf(2, true)),
                heights: [plain, piled].map((each) => of(each, 'text[text-anchor=end]').at(-1).textContent),
                times: of(plain, 'text[text-anchor=middle]').length,
                begins: of(plain, 'path.line').map((path) => path.getAttribute('d').split(' ')[0]),
                areas: of(piled, 'path.area').length,
                means, crosses: [plain, piled].map((each) => of(each, 'line.cross').length), pointed: legends(),
            };
            for (const key of ['ArrowLeft', 'PageUp']) piled.node.querySelector('svg').dispatchEvent(new KeyboardEvent('keydown', { key }));
            return { ...drawn, byKey: legends() };
        }"""
    )
    assert chart_state["steps"] == pytest.approx([25, 50, 0.1, 0.5, 1])
    assert chart_state["heights"] == ["12.5", "15"]
    assert chart_state["times"] >= 3
    assert chart_state["begins"] == ["M54.0", "M54.0"]  # the left edge
    assert chart_state["areas"] == 2
    assert chart_state["means"] == ["one10.25two2.5"] * 2
    assert chart_state["crosses"] == [1, 1]
    assert chart_state["pointed"] == ["one12.5two2.5"] * 2
    assert chart_state["byKey"] == ["one8two2.5"] * 2


def test_charts_update_when_requests_arrive(page: Any, served: Running) -> None:
    open_view(page, served, "model/echo/overview")
    chart = page.get_by_role("img", name=re.compile("^Requests per second"))
    expect(chart).to_have_attribute("aria-label", re.compile(r"mean: 1.0 0$"))
    with repeated_requests(lambda: predict(served, "echo", content=b"[1]")):
        expect(chart).to_have_attribute("aria-label", re.compile(r"mean: 1.0 (0\.)?[1-9]"))
        expect(chart.locator("path.line")).to_have_attribute("d", re.compile(r"L.*L"))
        for label in (
            "^Latency, 10 s mean: p99 .* (ms|µs|s), p50",
            "^Time by stage, .*inference [0-9.]+ (ms|µs|s)",
        ):
            expect(page.get_by_role("img", name=re.compile(label))).to_be_visible()


def test_workers_and_versions_can_be_changed(
    page: Any, empty_server: Running, management: httpx.Client
) -> None:
    register(management, "luminance.mar", "luminance2.mar")
    open_view(page, empty_server, "model/luminance/overview")
    second = page.get_by_role("region", name="Version 2.0", exact=True)
    click(second, "Scaling and limits")
    drawer = page.get_by_role("dialog", name="Version 2.0: scaling and limits")
    names = (
        "Workers",
        "Batch size",
        "Longest wait for a full batch, ms",
        "Queue size",
        "Response timeout, seconds",
        "Deadline of a request, ms",
    )
    assert [drawer.get_by_label(name, exact=True).input_value() for name in names] == [
        "1",
        "1",
        "100",
        "100",
        "120",
        "0",
    ]
    expect(drawer.get_by_role("button", name="Apply")).to_be_disabled()
    fill(drawer, "Workers", "2", exact=True)
    fill(drawer, "Batch size", "4", exact=True)
    fill(drawer, "Queue size", "0", exact=True)
    # The field's own minimum is removed; it would keep the invalid value from being sent.
    drawer.get_by_label("Queue size", exact=True).evaluate("(field) => (field.min = '')")
    expect(drawer.get_by_role("region", name="Changes").get_by_role("listitem")).to_have_text(
        ["Workers1→2", "Batch size1→4", "Queue size100→0"]
    )
    click(drawer, "Apply")
    expect(drawer.get_by_role("alert")).to_contain_text("job_queue_size")
    fill(drawer, "Queue size", "50", exact=True)
    click(drawer, "Apply")
    expect(drawer).to_have_count(0)
    second.locator("summary").click()
    expect(second.locator("tbody tr")).to_have_count(2)
    expect(second.locator(".facts div", has_text="Batch size")).to_contain_text("4")
    (description,) = management.get("/models/luminance/2.0").json()
    assert [
        description[name] for name in ("minWorkers", "batchSize", "jobQueueSize", "responseTimeout")
    ] == [2, 4, 50, 120]
    click(second, "Make default")
    expect(page.get_by_role("dialog").get_by_role("listitem")).to_have_text(
        "Default version1.0→2.0"
    )
    click(page.get_by_role("dialog"), "Make default")
    expect_text(second, "default", exact=True)
    assert management.get("/models/luminance").json()[0]["modelVersion"] == "2.0"


def test_a_replacing_version_has_the_same_number_of_workers(
    page: Any, empty_server: Running, management: httpx.Client
) -> None:
    register(management, "luminance.mar")
    management.put("/models/luminance", params={"min_worker": 2, "synchronous": "true"})
    open_view(page, empty_server)
    click(page, "Register a model")
    fill(page, "Archive", "luminance2.mar")
    page.get_by_label(
        re.compile("Replace the served version once this one is loaded; no request is lost")
    ).check()
    click(page, "Register", exact=True)
    expect(
        page.get_by_role("status").get_by_text("has taken the place of version 1.0")
    ).to_be_visible()
    (version,) = management.get("/models/luminance/all").json()
    assert (version["modelVersion"], version["minWorkers"]) == ("2.0", 2)


def test_traffic_is_split_with_the_bar_and_the_change_undone(
    page: Any, empty_server: Running, management: httpx.Client
) -> None:
    register(management, "luminance.mar", "luminance2.mar")
    open_view(page, empty_server, "model/luminance/traffic")
    shares = page.get_by_role("region", name="Versions and their shares")
    first, second = (
        shares.get_by_role("row", name=re.compile(rf"^{version}")) for version in ("1.0", "2.0")
    )
    expect(first).to_contain_text("100.0 %")
    border = page.get_by_role("slider", name="Border between 1.0 and 2.0")
    box = page.locator(".parts").bounding_box()
    border.hover()
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 10)
    page.mouse.up()
    expect(border).to_have_attribute("aria-valuenow", "50")
    page.keyboard.press("PageDown")
    page.keyboard.press("ArrowLeft")
    expect(border).to_have_attribute("aria-valuetext", "1.0: 39 %, 2.0: 61 %")
    expect(page.get_by_label("Share of version 2.0, percent")).to_have_value("61")
    fill(page, "Share of version 2.0, percent", "75")
    page.get_by_label("Share of version 2.0, percent").press("Enter")
    expect(page.get_by_label("Share of version 1.0, percent")).to_have_value("25")
    # Nothing is sent without the dialog.
    assert management.get("/models/luminance/traffic").json()["traffic"] == {}
    click(page, "Review and apply")
    dialog = page.get_by_role("dialog", name="Split requests")
    expect(dialog.get_by_role("listitem")).to_have_text(
        ["Version 1.0100 %→25 %", "Version 2.00 %→75 %"]
    )
    click(dialog, "Apply")
    expect(first).to_contain_text("25.0 %")
    expect(second).to_contain_text("75.0 %")
    expect(page.get_by_text("These shares are not applied yet.")).to_be_hidden()
    border.focus()
    page.keyboard.press("Home")
    click(page, "Review and apply")
    click(dialog, "Apply")
    expect(second).to_contain_text("100.0 %")
    answer = predict(empty_server, "luminance", content=png(10), headers=PNG)
    assert (answer.headers["x-tsx-model-version"], "new" in answer.json()) == ("2.0", True)
    click(page, "Undo the last change")
    dialog = page.get_by_role("dialog", name="Undo the last change")
    expect(dialog.get_by_role("listitem")).to_have_text(
        ["Version 1.00 %→25 %", "Version 2.0100 %→75 %"]
    )
    click(dialog, "Undo", exact=True)
    expect(page.get_by_label("Share of version 2.0, percent")).to_have_value("75")
    click(page, "Set a label")
    dialog = page.get_by_role("dialog", name="Set a label")
    fill(dialog, "Label", "canary", exact=True)
    expect(dialog.get_by_role("listitem")).to_have_text("canary2.0")
    click(dialog, "Set")
    expect(second).to_contain_text("canary")
    fill(page, "Share of version 2.0, percent", "-1")
    page.get_by_label("Share of version 2.0, percent").press("Enter")
    # The browser itself refuses the invalid share.
    expect(page.get_by_role("button", name="Review and apply")).to_be_hidden()


def test_shares_follow_a_border_dragged_past_others(page: Any, served: Running) -> None:
    open_view(page, served)
    shares = page.evaluate(
        """async () => {
            const { splitBar, withShare } = await import('./split.js');
            const moved = [];
            const bar = splitBar((shares) => moved.push(shares));
            document.body.append(bar.node);
            bar.update(['1', '2', '3'], [100, 0, 0]);
            const [, last] = bar.node.querySelectorAll('[role=slider]');
            last.dispatchEvent(new KeyboardEvent('keydown', { key: 'PageDown' }));
            return [...moved, withShare([50, 30, 20], 0, 20), withShare([100, 0], 0, 60), withShare([100, 0], 1, 100)];
        }"""
    )
    assert shares == [[90, 0, 10], [20, 48, 32], [60, 40], [0, 100]]


def test_rules_are_set_and_removed_and_other_users_changes_are_kept(
    page: Any, empty_server: Running, management: httpx.Client
) -> None:
    register(management, "luminance.mar", "luminance2.mar")
    open_view(page, empty_server, "model/luminance/traffic")
    panel = page.get_by_role("region", name="Traffic", exact=True)
    expect_text(panel, "None: the shares alone decide.")
    click(panel, "Edit rules")
    form = page.get_by_role("dialog", name="Rules and stickiness")
    for header, comparison, value, target in (
        ("X-Beta", "is", "1", "2.0"),
        ("X-User", "matches", "test-.*", "canary"),
    ):
        click(form, "Add rule")
        expect(form.get_by_label("Header of the rule").last).to_be_focused()
        form.get_by_label("Header of the rule").last.fill(header)
        form.get_by_label("How its value is compared").last.select_option(comparison)
        form.get_by_label("Value of the header").last.fill(value)
        form.get_by_label("Version or label of the rule").last.fill(target)
    fill(form, "Keep a client on one version by", "header:X-User")
    changes = form.get_by_role("region", name="Changes").get_by_role("listitem")
    expect(changes).to_have_count(3)
    expect(changes.last).to_have_text("Rule 2X-User matches test-.* → canary")
    # Another user sets a label in the meantime.
    management.put("/models/luminance/labels/canary", json={"version": "2.0"})
    click(form, "Apply")
    expect_text(page, "The traffic policy was changed.")
    traffic = management.get("/models/luminance/traffic").json()["traffic"]
    first, second = (
        {"header": "X-Beta", "equals": "1", "to": "2.0"},
        {"header": "X-User", "matches": "test-.*", "to": "canary"},
    )
    assert traffic == {
        "labels": {"canary": "2.0"},
        "rules": [first, second],
        "sticky": "header:X-User",
    }
    expect(panel).to_contain_text("X-Beta is 1 → 2.0")
    expect(panel).to_contain_text("canary → 2.0")
    for header, version in (
        ({"X-Beta": "1"}, "2.0"),
        ({"X-User": "test-ann"}, "2.0"),
        ({"X-User": "ann"}, "1.0"),
    ):
        answer = predict(empty_server, "luminance", content=png(10), headers=PNG | header)
        assert answer.headers["x-tsx-model-version"] == version
    click(panel, "Edit rules")
    form.get_by_label("Value of the header").last.fill("(")
    click(form, "Apply")
    expect(form.get_by_role("alert")).to_contain_text("not a regular expression of RE2")
    expect(form.get_by_label("Value of the header").last).to_have_value("(")
    form.get_by_role("button", name="Remove this rule").last.click()
    click(form, "Apply")
    expect(form).to_have_count(0)
    expect(panel).not_to_contain_text("X-User matches")
    click(page, "Undo the last change")
    click(page.get_by_role("dialog"), "Undo", exact=True)
    expect(panel).to_contain_text("X-User matches test-.* → canary")


def test_requests_are_recorded_and_recordings_removed(
    page: Any, empty_server: Running, management: httpx.Client
) -> None:
    register(management, "echo.mar")
    open_view(page, empty_server, "model/echo/traffic")
    click(page, "Record", exact=True)
    dialog = page.get_by_role("dialog", name="Record requests")
    fill(dialog, "Percent recorded", "100")
    fill(dialog, "Maximum size", "ten")
    dialog.get_by_label("Record the answers as well, so that a replay can compare them").check()
    expect(dialog.get_by_role("listitem").first).to_have_text(
        "Recorded0 %→100 % of the requests, with answers"
    )
    click(dialog, "Record", exact=True)
    expect(dialog.get_by_role("alert")).to_contain_text("max_size is 'ten'")
    fill(dialog, "Maximum size", "1MB")
    click(dialog, "Record", exact=True)
    panel = page.get_by_role("region", name="Recording", exact=True)
    expect_text(panel, "100 % of the requests, with answers, up to 1.0 MB, for 24 h")
    expect(page.get_by_role("button", name="Record", exact=True)).to_be_hidden()
    predict(empty_server, "echo", json=[1])
    expect(panel.locator(".tile", has_text="Recorded")).to_contain_text("1")
    line = panel.get_by_label("replay the recording", exact=True).inner_text()
    assert Path(line.removeprefix("tsx replay ")) == Path(
        management.get("/models/echo/record").json()["directory"]
    )
    click(panel, "Stop recording")
    expect_text(panel, "off", exact=True)
    click(panel, "Remove files")
    click(page.get_by_role("dialog"), "Remove")
    expect(panel).to_be_hidden()
    assert management.get("/models/echo/record").json()["files"] == 0


def test_a_rollout_is_started_watched_and_rolled_back(
    page: Any, empty_server: Running, management: httpx.Client
) -> None:
    register(management, "luminance.mar", "luminance2.mar")
    open_view(page, empty_server, "model/luminance/traffic")
    click(page, "Start rollout")
    dialog = page.get_by_role("dialog", name="Start rollout")
    fill(dialog, "Steps, percent", "40, 30")
    click(dialog, "Start rollout")
    expect(dialog.get_by_role("alert")).to_contain_text("steps")
    fill(dialog, "Steps, percent", "40, 100")
    changes = dialog.get_by_role("listitem")
    expect(changes.first).to_have_text("Version 2.00 %→40 %, then 100 %")
    expect(changes.nth(1)).to_have_text("Version 1.0100 %→60 %, then 0 %")
    click(dialog, "Start rollout")
    panel = page.get_by_role("region", name="Rollout", exact=True)
    expect_text(panel, "version 1.0 to 2.0, step 1 of 2")
    expect(panel.get_by_role("list", name="Steps").locator("[aria-current=step]")).to_have_text(
        "40 %"
    )
    expect(
        page.get_by_role("region", name="Versions and their shares").get_by_role(
            "row", name=re.compile("^2.0")
        )
    ).to_contain_text("40.0 %")
    click(panel, "Roll back")
    click(page.get_by_role("dialog"), "Roll back")
    expect(panel.locator(".chip")).to_have_text("went back")
    assert management.get("/models/luminance/rollout").json()["status"] == "went back"


def test_requests_are_mirrored_and_different_responses_are_shown(
    page: Any, empty_server: Running, management: httpx.Client
) -> None:
    register(management, "luminance.mar", "luminance2.mar")
    open_view(page, empty_server, "model/luminance/traffic")
    click(page, "Mirror traffic")
    dialog = page.get_by_role("dialog", name="Mirror traffic")
    fill(dialog, "Percent of the requests", "100")
    dialog.get_by_label("Compare answers").select_option("by numbers within a tolerance")
    fill(dialog, "Relative tolerance", "0.25")
    fill(dialog, "Fields to ignore", "id, outputs.*.took")
    expect(dialog.get_by_role("listitem").first).to_have_text(
        "Mirror100 % of the requests also to 2.0, answers compared by numbers within a tolerance"
    )
    click(dialog, "Mirror traffic")
    panel = page.get_by_role("region", name="Mirrored traffic", exact=True)
    expect_text(panel, "100 % of the requests also to 2.0")
    compare = management.get("/models/luminance/shadow").json()["shadow"]["compare"]
    assert compare == {"kind": "numeric", "ignore": ["id", "outputs.*.took"], "rtol": 0.25}
    for light in (10, 200):
        answer = predict(empty_server, "luminance", content=png(light), headers=PNG)
        assert "new" not in answer.json()
    expect(panel.locator(".tile", has_text="Disagreed")).to_contain_text("2")
    panel.locator("details summary").first.click()
    expect_heading(panel, re.compile("^version 2.0: 200"))
    click(panel, "Stop mirroring")
    expect_text(panel, "off", exact=True)
    assert management.get("/models/luminance/traffic").json()["traffic"].get("shadow") is None


def test_metrics_of_the_model_are_shown_and_can_be_filtered(page: Any, served: Running) -> None:
    open_view(page, served, "model/echo/metrics")
    table = page.get_by_role("region", name="Metrics of this model")
    expect(table).to_contain_text("ts_inference_requests_total")
    expect(table.get_by_text("model_version=1.0").first).to_be_hidden()
    table.get_by_text("tsx_queue_capacity").click()
    expect(table.locator("details[open]")).to_contain_text("100")
    fill(page, "Filter", "queue_depth")
    expect(table).not_to_contain_text("ts_inference_requests_total")
    predict(served, "echo", json=[1])
    expect(page.get_by_role("region", name="Slowest requests").first).to_contain_text("inference")
    expect(table).to_contain_text("tsx_queue_depth")


def test_a_request_is_explained_by_its_id(page: Any, served: Running) -> None:
    request = predict(served, "echo", json=[1]).headers["x-request-id"]
    open_view(page, served, "model/echo/metrics")
    panel = page.get_by_role("region", name="Explain a request")
    for unknown in ("no-such-id", "a/b"):
        fill(panel, "Request id", unknown)
        click(panel, "Explain")
        expect(panel.get_by_role("alert")).to_contain_text(f"Request {unknown} is not known")
    fill(panel, "Request id", request)
    page.keyboard.press("Enter")
    expect_text(panel, "echo 1.0: 200 after")
    expect(panel.get_by_role("list", name="Where the time went")).to_contain_text("inference")
    expect(panel.get_by_role("alert")).to_be_hidden()


def test_an_asynchronous_request_is_shown_in_the_queue_and_rerun(
    page: Any, served: Running
) -> None:
    open_view(page, served, "model/echo/try")
    page.get_by_label("Answer later").check()
    send_json(page, "fail")
    expect_text(page, "202 Accepted")
    assert "Prefer: respond-async" in page.locator("pre[data-for=curl]").inner_text()
    page.get_by_role("link", name="Show the job").click()
    job = row(page, "echo")
    expect_text(job, "failed", exact=True)
    click(job, "Show answer")
    expect(page.get_by_role("region", name="Answer")).to_contain_text("the echo is broken")
    click(job, "Retry")
    expect_text(page, "The job is queued again.")
    expect_text(job, "2 attempts")
    check_accessibility(page, "jobs")
    page.set_viewport_size({"width": 360, "height": 740})
    check_width(page, "jobs")
    page.get_by_label("State").select_option("cancelled")
    expect_text(page, "No job matches.")


def test_an_unregistered_model_is_reported(page: Any, served: Running) -> None:
    open_view(page, served, "model/nosuch")
    expect_text(page, "No model with this name is registered.")
    expect(page.get_by_role("link", name="Playground")).to_be_hidden()
    page.get_by_role("link", name="All models").click()
    expect(row(page, "echo")).to_be_visible()


@pytest.mark.nightly
def test_the_page_reports_a_stopped_server_and_recovers(
    page: Any, start: Callable[..., Running], free_ports: Callable[[int], list[int]]
) -> None:
    inference, management, metrics = free_ports(3)
    ports = ("--port", inference, "--management-port", management, "--metrics-port", metrics)
    server = start("echo.mar", ports=ports)
    open_view(page, server)
    model = row(page, "echo")
    expect(model.get_by_text("ready", exact=True)).to_be_visible()
    server.process.kill()
    server.process.wait()
    expect(page.get_by_role("alert").get_by_text("The server does not answer")).to_be_visible()
    check_accessibility(page, "a server that does not answer")
    start("echo.mar", ports=ports)
    expect(page.get_by_role("alert").get_by_text("The server does not answer")).to_be_hidden()
    expect(model.get_by_text("ready", exact=True)).to_be_visible()
    model.get_by_role("link").click()
    expect_heading(page, "echo")


def test_the_theme_follows_the_system_until_one_is_chosen(page: Any, served: Running) -> None:
    background = "getComputedStyle(document.documentElement).backgroundColor"
    open_view(page, served)
    themes_seen = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        themes_seen.append(page.evaluate(background))
    assert themes_seen[0] != themes_seen[1]
    page.get_by_label("Theme").select_option("light")
    assert page.evaluate(background) == themes_seen[0]
    page.reload()
    assert page.evaluate(background) == themes_seen[0]


@pytest.mark.nightly
def test_every_view_is_accessible_and_fits_a_phone(page: Any, served: Running) -> None:
    open_view(page, served)
    expect(row(page, "echo")).to_be_visible()
    click(page, "Register a model")
    check_accessibility(page, "models")
    page.keyboard.press("Escape")
    tabs = ("try", "overview", "traffic", "monitor", "errors", "metrics", "nonsense")
    for tab in tabs:
        open_view(page, served, f"model/luminance/{tab}")
        expect(
            page.locator(".tabs [aria-current=page]" if tab != "nonsense" else ".lost")
        ).to_be_visible()
        if tab == "traffic":
            for button in ("Start rollout", "Mirror traffic", "Edit rules"):
                click(page, button)
                check_accessibility(page, button)
                page.keyboard.press("Escape")
            page.get_by_role("slider").press("PageDown")
        if tab == "overview":
            page.get_by_role("button", name="Scaling and limits").first.click()
            check_accessibility(page, "drawer")
            page.keyboard.press("Escape")
        if tab == "metrics":
            expect(page.get_by_text("ts_inference_requests_total").first).to_be_visible()
        check_accessibility(page, tab)
    open_view(page, served, "model/echo/try")
    send_json(page, "fail")
    expect(page.get_by_role("link", name="Show the traceback")).to_be_visible()
    send_json(page, {"cat": 0.75, "dog": 0.25})
    expect(page.get_by_role("list", name="Labels")).to_be_visible()
    check_accessibility(page, "an answer")
    page.set_viewport_size({"width": 360, "height": 740})
    check_accessibility(page, "narrow", dark=False)
    check_width(page, "an answer")
    for route in ("", *(f"model/luminance/{tab}" for tab in tabs[:-1])):
        open_view(page, served, route)
        expect(page.locator("main > div")).to_be_visible()
        check_width(page, route)
