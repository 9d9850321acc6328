"""The web page with unusual responses, files and tokens, restarted servers and long lists."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.models import make_model
from tests.support.servers import Running
from tests.ui.browser_helpers import (
    click,
    expect,
    expect_heading,
    expect_text,
    fill,
    open_view,
    png,
    register,
    row,
    run_snippet,
    send_json,
    snippets_of,
)
from tests.ui.conftest import IMAGE_HANDLER

TEXT = """it's "so": $HOME `date` \\n
%s é {a}"""


@pytest.fixture(scope="module")
def server(start: Callable[..., Running]) -> Running:
    return start("odd.mar", "luminance.mar")


@pytest.fixture(scope="module")
def token_server(start: Callable[..., Running]) -> Running:
    """Start a server that requires tokens."""
    return start("odd.mar", management_token="right", inference_token="it's other")


def test_snippets_reproduce_a_request_to_a_labelled_version(
    page: Any, server: Running, tmp_path: Path
) -> None:
    with httpx.Client(base_url=server.address("models"), timeout=60) as client:
        assert client.put("/models/odd/labels/stable", json={"version": "1.0"}).status_code == 200
    open_view(page, server, "model/odd/try")
    page.get_by_label("Version", exact=True).select_option("stable")
    send_json(page, {"answer": {"text": TEXT}})
    expect_text(page, "200 OK")
    for tool, snippet in snippets_of(page).items():
        assert "stable" in snippet
        assert json.loads(run_snippet(tool, snippet, tmp_path).stdout)["text"] == TEXT, tool


def test_snippets_read_a_file_whatever_its_name(page: Any, server: Running, tmp_path: Path) -> None:
    file = tmp_path / "-it's $one; é.png"
    file.write_bytes(png(204))
    open_view(page, server, "model/luminance/try")
    page.get_by_label("Image", exact=True).last.set_input_files(file)
    click(page, "Send")
    expect(page.get_by_role("list", name="Labels")).to_be_visible()
    for tool, snippet in snippets_of(page).items():
        answer = json.loads(run_snippet(tool, snippet, tmp_path).stdout)
        assert answer["light"] == pytest.approx(0.8), tool
    with page.expect_download() as download:
        page.get_by_role("link", name="Save it").click()
    assert Path(download.value.path()).read_bytes() == file.read_bytes()


def test_snippets_save_a_binary_answer(page: Any, server: Running, tmp_path: Path) -> None:
    open_view(page, server, "model/odd/try")
    send_json(page, {"bytes": 300})
    expect_text(page, "75 KiB of binary data.")
    for tool, snippet in snippets_of(page).items():
        run_snippet(tool, snippet, tmp_path)
        assert (tmp_path / "answer.bin").read_bytes() == bytes(range(256)) * 300, tool
        (tmp_path / "answer.bin").unlink()


def test_numbers_are_shown_unchanged(page: Any, server: Running) -> None:
    open_view(page, server, "model/odd/try")
    send_json(page, {"answer": '[{"id": 12345678901234567891, "score": 1.0}]'})
    expect(page.get_by_role("region", name="The answer as a table")).to_contain_text(
        "12345678901234567891"
    )
    assert '"id": 12345678901234567891,\n    "score": 1.0' in str(
        page.locator("details.raw pre").text_content()
    )


def test_empty_failed_and_truncated_responses_are_shown(page: Any, server: Running) -> None:
    open_view(page, server, "model/odd/try")
    answer = page.get_by_role("region", name="Answer", exact=True)
    for request in ({"answer": ""}, {"answer": "", "status": 204}):
        send_json(page, request)
        expect(
            answer.get_by_text(re.compile(f"^{request.get('status', 200)} [A-Z]"))
        ).to_be_visible()
        expect_text(answer, "The answer is empty.")
    send_json(page, {"answer": '{"error": {"message": "too odd", "hint": "less"}}', "status": 422})
    expect(answer.locator("pre.problem")).to_have_text("too odd")
    expect(answer.locator("details.raw pre")).to_contain_text('"hint": "less"')
    send_json(page, {"answer": [{f"k{column}": column for column in range(60)}] * 600})
    expect_text(answer, "The first 500 of 600 rows.")
    expect_text(answer, "The first 50 of 60 columns.")
    send_json(page, {"answer": [{"cat": [1, 2, 3, 4]}] * 400})
    expect_text(answer, "The first 300 of 400 boxes.")
    send_json(page, {"answer": "x" * 70_000})
    expect_text(answer, "The first 60,000 of 70,000 characters.")


def test_a_slow_response_shows_its_time_and_can_be_stopped(page: Any, server: Running) -> None:
    open_view(page, server, "model/odd/try")
    send_json(page, {"seconds": 1.5, "answer": "late"})
    expect(page.locator(".status")).to_have_text(re.compile(r"^Waiting for the answer … \d s$"))
    click(page, "Stop", exact=True)
    expect(page.locator(".status")).to_have_text("Stopped.")
    send_json(page, {"answer": "soon"})
    expect_text(page, "soon", exact=True)


def test_a_changed_file_must_be_chosen_again(page: Any, server: Running, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(10))
    open_view(page, server, "model/luminance/try")
    page.get_by_label("Image", exact=True).last.set_input_files(tmp_path / "a.png")
    expect(page.get_by_alt_text("The image to be sent")).to_be_visible()
    (tmp_path / "a.png").write_bytes(png(200, (90, 90)))
    click(page, "Send")
    expect(page.get_by_role("alert").get_by_text("a.png cannot be read")).to_be_visible()
    page.get_by_label("Image", exact=True).last.set_input_files([])
    page.get_by_label("Image", exact=True).last.set_input_files(tmp_path / "a.png")
    click(page, "Send")
    expect(page.get_by_role("list", name="Labels")).to_be_visible()


def test_the_form_follows_the_handler_once_its_worker_reports_its_input(
    page: Any, empty_server: Running, management: httpx.Client
) -> None:
    register(management, "luminance.mar", workers=0)
    open_view(page, empty_server, "model/luminance/try")
    expect(page.get_by_role("radio", name="File")).to_be_checked()
    management.put("/models/luminance", params={"min_worker": 1, "synchronous": "true"})
    expect(page.get_by_role("radio", name="Image")).to_be_checked()
    text = page.get_by_role("radio", name="Text")
    text.check()
    expect(text).to_be_checked()
    # The user's choice is kept for the next version and after a reload.
    register(management, "luminance2.mar")
    expect_text(page, "2 versions, default 1.0")
    expect(text).to_be_checked()
    page.reload()
    expect_heading(page, "luminance")
    expect(text).to_be_checked()


def sampled_model(directory: Path, handler: str, **samples: bytes) -> Path:
    """Make the directory of a model with samples, whose names end in their type."""
    model = make_model(directory / "sampled", handler)
    (model / "samples").mkdir()
    for name, content in samples.items():
        (model / "samples" / name.replace("_", ".")).write_bytes(content)
    return model


def test_samples_are_shown_and_earlier_requests_can_be_resent(
    page: Any, start: Callable[..., Running], tmp_path: Path
) -> None:
    samples = {"dark_png": png(0), "light_png": png(255), "row_json": b'{"light": 1}'}
    server = start(sampled_model(tmp_path, IMAGE_HANDLER, **samples))
    # The playground is the first tab.
    open_view(page, server, "model/sampled")
    light = page.get_by_role("button", name="light.png")
    expect(light.locator("img")).to_have_js_property("naturalWidth", 64)
    expect(page.get_by_role("button", name="row.json")).to_contain_text('{"light": 1}')
    # The JSON sample fills its field; it is sent only when Send is clicked.
    expect(page.get_by_label("JSON", exact=True).last).to_have_value('{"light": 1}')
    bars = page.get_by_role("list", name="Labels").get_by_role("listitem")
    for name, label in (("light.png", "light"), ("dark.png", "dark")):
        page.get_by_role("button", name=name, exact=True).first.click()
        expect_text(page, re.compile(f"^{name}, "))
        click(page, "Send")
        expect(bars.first).to_contain_text(label)
    page.get_by_label("JSON", exact=True).last.evaluate("(area) => (area.value = '[]')")
    click(page, "row.json")
    expect(page.get_by_role("radio", name="JSON")).to_be_checked()
    expect(page.get_by_label("JSON", exact=True).last).to_have_value('{"light": 1}')
    history = page.get_by_role("region", name="History").get_by_role("button")
    expect(history).to_have_count(2)
    page.get_by_role("navigation", name="Breadcrumb").get_by_role("link", name="Models").click()
    page.get_by_role("link", name="sampled").click()
    expect(history).to_have_count(2)
    history.filter(has_text="light.png").click()
    expect(page.get_by_role("radio", name="Image")).to_be_checked()
    expect(bars.first).to_contain_text("light")
    click(page, "Send")
    expect(history).to_have_count(3)
    expect(history.first).to_contain_text("light.png")


def test_without_a_declared_input_the_form_follows_the_first_sample(
    page: Any, start: Callable[..., Running], tmp_path: Path
) -> None:
    handler = "def handle(data, context):\n    return data\n"
    server = start(sampled_model(tmp_path, handler, row_json=b'{"row": [1]}'))
    open_view(page, server, "model/sampled")
    expect(page.get_by_role("radio", name="JSON")).to_be_checked()
    expect(page.get_by_label("JSON", exact=True).last).to_have_value('{"row": [1]}')


def test_a_version_without_workers_cannot_be_made_the_default(
    page: Any, empty_server: Running, management: httpx.Client
) -> None:
    register(management, "luminance.mar")
    register(management, "luminance2.mar", workers=0)
    open_view(page, empty_server, "model/luminance/overview")
    second = page.get_by_role("region", name="Version 2.0", exact=True)
    button = second.get_by_role("button", name="Make default")
    expect(button).to_be_disabled()
    expect(button).to_have_attribute("title", re.compile("has no workers"))
    management.put("/models/luminance/2.0", params={"min_worker": 1, "synchronous": "true"})
    expect(button).to_be_enabled()


def test_leaving_the_playground_switches_the_camera_off(page: Any, server: Running) -> None:
    page.add_init_script(
        """const ask = navigator.mediaDevices.getUserMedia.bind(navigator.mediaDevices);
        navigator.mediaDevices.getUserMedia = async (wanted) => (window.seen = await ask(wanted));"""
    )
    open_view(page, server, "model/luminance/try")
    click(page, "Use camera")
    expect(page.get_by_role("button", name="Take picture")).to_be_visible()
    page.get_by_role("link", name="Overview").click()
    expect(page.get_by_role("button", name="Take picture")).to_have_count(0)
    assert page.evaluate("seen.getTracks().map((track) => track.readyState)") == ["ended"]


def test_a_file_dropped_outside_its_field_does_not_replace_the_page(
    page: Any, server: Running
) -> None:
    open_view(page, server)
    expect_heading(page, "Models")
    assert page.evaluate(
        "!document.body.dispatchEvent(new DragEvent('drop', { bubbles: true, cancelable: true }))"
    )


def test_a_browser_without_storage_shows_the_page(page: Any, server: Running) -> None:
    page.add_init_script(
        """for (const name of ['localStorage', 'sessionStorage'])
            Object.defineProperty(window, name, { get() { throw new DOMException('denied', 'SecurityError'); } });"""
    )
    open_view(page, server)
    expect(row(page, "odd")).to_be_visible()
    page.get_by_label("Theme").select_option("dark")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_a_token_is_requested_until_correct_and_kept_in_this_tab(
    page: Any, token_server: Running, tmp_path: Path
) -> None:
    dialog = page.get_by_role("dialog", name="This server requires a token")
    for view in ("logs", "server", "jobs", ""):
        open_view(page, token_server, view)
        expect(dialog).to_be_visible()
        expect(page.locator("main")).not_to_contain_text("odd")
    # The browser itself closes a dialog at the second Escape.
    for _ in range(3):
        page.keyboard.press("Escape")
        expect(dialog).to_be_visible()
    field = dialog.get_by_label("Management token")
    for token, problem in (
        ("ключ", "A token contains only ASCII letters, digits"),
        ("wrong", "The server rejects this token."),
    ):
        field.fill(token)
        page.keyboard.press("Enter")
        expect_text(dialog, problem)
        assert page.evaluate("sessionStorage.length") == 0
    field.fill("right")
    page.keyboard.press("Enter")
    expect(row(page, "odd")).to_be_visible()
    assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
    page.evaluate("sessionStorage.setItem('tsx-token', 'one that has expired')")
    expect(dialog).to_be_visible()
    field.fill("right")
    page.keyboard.press("Enter")
    expect(dialog).to_have_count(0)
    open_view(page, token_server, "model/odd/try")
    send_json(page, {"answer": {"a": 1}})
    expect_text(page, "200 OK")
    for tool, snippet in snippets_of(page).items():
        result = run_snippet(tool, snippet, tmp_path, TSX_INFERENCE_TOKEN="it's other")
        assert json.loads(result.stdout) == {"a": 1}, tool
    page.reload()
    expect_heading(page, "odd")
    click(page, "Forget token")
    expect(dialog).to_be_visible()


def test_a_view_recovers_after_failed_requests(page: Any, server: Running) -> None:
    open_view(page, server, "model/odd/traffic")
    shares = page.get_by_role("region", name="Versions and their shares")
    expect(shares).to_be_visible()
    page.route(
        "**/models/odd/traffic",
        lambda route: route.fulfill(
            status=404, json={"type": "ModelNotFoundException", "message": "no"}
        ),
    )
    expect(shares).to_be_hidden()
    page.unroute("**/models/odd/traffic")
    expect(shares).to_be_visible()


def test_the_log_starts_afresh_after_a_restart(page: Any, server: Running) -> None:
    line = {
        "number": 1,
        "at": 1.0,
        "worker": "9000",
        "stream": "stdout",
        "text": "of the first",
        "request_ids": [],
        "version": "1.0",
    }
    page.route("**/ui/api/log/odd", lambda route: route.fulfill(json=[line]))
    open_view(page, server, "model/odd/errors")
    expect(page.get_by_role("log")).to_contain_text("1970-01-01")
    expect(page.get_by_role("log")).to_contain_text("of the first")
    line |= {"at": 2.0, "text": "of the second"}
    expect(page.get_by_role("log")).to_contain_text("of the second")


def test_charts_start_afresh_after_a_restart(page: Any, server: Running) -> None:
    """The page asks for points after its newest one, which the new server has not reached."""
    queries: list[str] = []

    def respond(route: Any) -> None:
        state = route.fetch().json()
        state["server"]["start"] = "second" if queries else "first"
        queries.append(route.request.url.partition("?")[2])
        route.fulfill(json=state | {"newest": 10**6 if len(queries) == 1 else state["newest"]})

    page.route("**/ui/api/state*", respond)
    with page.expect_response(re.compile("ui/api/state$")):
        open_view(page, server)
    page.unroute_all(behavior="wait")
    assert queries[:3] == ["since=0", "since=1000000", ""]


def test_many_versions_and_models_are_distinguished(
    page: Any, empty_server: Running, management: httpx.Client
) -> None:
    register(management, *(f"many{number}.mar" for number in range(1, 13)), workers=0)
    for number in range(1, 11):
        register(management, "odd.mar", workers=0, model_name=f"odd{number}")
    open_view(page, empty_server)
    rows = page.get_by_role("region", name="Models").locator("tbody tr th.name")
    expect(rows).to_have_count(11)
    fill(page, "Filter", "odd1")
    expect(rows).to_have_count(2)
    fill(page, "Filter", "nothing")
    expect_text(page, "No model matches the filter.")
    open_view(page, empty_server, "model/many/overview")
    expect(page.get_by_role("heading", level=3)).to_have_text(
        [f"Version {number}.0" for number in range(1, 13)]
    )
    expect_text(page, "The charts show 1 of 12 versions: those with the most recent requests.")


def test_a_long_error_is_abbreviated_until_it_is_expanded(page: Any, server: Running) -> None:
    error = {
        "at": 1.0,
        "first": 1.0,
        "times": 1,
        "message": "m" * 5000,
        "traceback": "",
        "request_ids": [],
        "version": "1.0",
    }
    error |= {"kind": "a", "kind_times": 1, "kind_first": 1.0}
    page.route("**/ui/api/errors/odd", lambda route: route.fulfill(json=[error]))
    open_view(page, server, "model/odd/errors")
    expect(page.locator(".errors .headline")).to_have_text("m" * 300 + " …")
    page.locator(".errors summary").click()
    expect(page.get_by_text("m" * 5000, exact=True)).to_be_visible()


def test_numbers_and_times_have_their_unit(page: Any, server: Running) -> None:
    open_view(page, server)
    texts = page.evaluate(
        """async () => {
            const { clock, duration, number, span } = await import('./format.js');
            const now = Date.now() / 1000;
            const seconds = [0.9997, 0.0009996, 99.97, 0.0123, 2].map(duration);
            return [seconds, [12.5, 250, 0.5, 1234.5].map(number), span(600), clock(now).length, clock(now - 864000).length];
        }"""
    )
    assert texts == [
        ["1 s", "1 ms", "100 s", "12.3 ms", "2 s"],
        ["12.5", "250", "0.5", "1,235"],
        "10 min",
        8,
        19,
    ]
