"""The playground for a text-generation model, and its charts, in a real browser."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.models import make_model
from tests.support.servers import Running
from tests.support.streaming import CONFIG, TALKER
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
    run_snippet,
)


@pytest.fixture(scope="module")
def served(start: Callable[..., Running], store: Path) -> Running:
    make_model(store / "talker.mar", TALKER, config=CONFIG)
    return start("talker.mar", "echo.mar")


def ask(page: Any, text: str) -> None:
    fill(page, "Message", text)
    click(page, "Send")


def test_a_conversation_is_streamed_and_its_code_reproduces_it(
    page: Any, served: Running, tmp_path: Path
) -> None:
    open_view(page, served, "model/talker/try")
    fill(page, "System prompt", "Be <b>brief</b>.")
    fill(page, "Max tokens", "3")
    fill(page, "Temperature", "0")
    fill(page, "Stop", "END\n", exact=True)
    turns = page.get_by_role("log", name="Conversation").get_by_role("listitem")
    with page.expect_request(
        lambda request: "/ui/api/predict/talker/1.0/v1/chat/completions" in request.url
    ) as first:
        ask(page, "<i>good</i> day")
    expect(turns).to_have_count(2)
    expect(turns.last.locator(".said")).to_have_text("<i>good</i> day <i>good</i> ")
    expect(turns.last).to_contain_text(
        re.compile(r"first token after .*s · 3 tokens · .* tokens/s · length")
    )
    assert page.locator(".conversation i").count() == 0
    system = {"role": "system", "content": "Be <b>brief</b>."}
    body = json.loads(first.value.post_data)
    assert body["messages"] == [system, {"role": "user", "content": "<i>good</i> day"}]
    assert (body["max_tokens"], body["temperature"], body["stop"], body["stream"]) == (
        3,
        0,
        ["END"],
        True,
    )
    with page.expect_request(lambda request: "chat/completions" in request.url) as second:
        ask(page, "again")
    expect(turns).to_have_count(4)
    roles = [message["role"] for message in json.loads(second.value.post_data)["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    page.get_by_role("link", name="Overview").click()
    page.get_by_role("link", name="Playground").click()
    expect(turns).to_have_count(4)
    page.get_by_role("tab", name="openai").click()
    program = page.locator("pre[data-for=openai]").inner_text()
    compile(program, "openai", "exec")
    assert 'client.chat.completions.create(\n    model="talker",' in program
    page.get_by_role("tab", name="curl").click()
    line = page.locator("pre[data-for=curl]").inner_text()
    assert b"data: [DONE]" in run_snippet("curl", line, tmp_path).stdout
    click(page, "New conversation")
    expect(turns).to_have_count(0)
    page.reload()
    expect(page.get_by_label("Message")).to_be_visible()
    expect(turns).to_have_count(0)


def test_enter_sends_and_shift_enter_breaks_the_line(page: Any, served: Running) -> None:
    open_view(page, served, "model/talker/try")
    turns = page.get_by_role("log", name="Conversation").get_by_role("listitem")
    message = page.get_by_label("Message")
    message.fill("one")
    message.press("Shift+Enter")
    message.press_sequentially("two")
    expect(message).to_have_value("one\ntwo")
    # The Enter key of an input method ends a word, so it must not send.
    message.dispatch_event("keydown", {"key": "Enter", "isComposing": True})
    expect(message).to_have_value("one\ntwo")
    message.press("Enter")
    expect(turns).to_have_count(2)
    expect(turns.first).to_contain_text("one\ntwo")
    expect(message).to_have_value("")


def test_stop_ends_the_generation_in_the_worker(
    page: Any, served: Running, until: Callable[[Callable[[], object]], None]
) -> None:
    open_view(page, served, "model/talker/try")

    def count() -> int:
        return int(predict(served, "talker", json={"inputs": "cancelled"}).json()["cancelled"])

    count_before = count()
    ask(page, "slow words")
    answer = page.get_by_role("log").get_by_role("listitem").last
    expect(answer.locator(".said")).to_contain_text("slow")
    click(page, "Stop")
    expect(answer).to_contain_text("stopped")
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    expect(page.get_by_label("Message")).to_be_focused()
    until(lambda: count() > count_before)
    assert count() == count_before + 1


def test_a_failure_is_reported_and_the_message_can_be_sent_again(
    page: Any, served: Running
) -> None:
    open_view(page, served, "model/talker/try")
    fill(page, "Max tokens", "5000")
    ask(page, "too much")
    expect(
        page.get_by_role("alert").filter(has_text="max_tokens is more than the context has")
    ).to_be_visible()
    expect(page.get_by_label("Message")).to_have_value("too much")
    fill(page, "Max tokens", "")
    ask(page, "break it now")
    expect_text(page, "The answer was interrupted: the engine ended")
    expect(page.get_by_role("log").get_by_role("listitem").last).to_contain_text("interrupted")
    page.get_by_label("Task").select_option("Continue a text")
    expect_heading(page, "Continue a text")
    expect(page.get_by_label("System prompt")).to_be_hidden()
    ask(page, "once upon")
    expect(page.get_by_role("log").get_by_role("listitem")).to_have_count(2)
    expect(page.locator(".said").last).to_contain_text("once upon once upon")


def test_single_requests_and_other_views_are_also_available(page: Any, served: Running) -> None:
    open_view(page, served, "model/talker/try")
    page.get_by_role("radio", name="Single request").check()
    expect(page.get_by_role("radio", name="JSON")).to_be_checked()
    expect(page.get_by_role("region", name="Settings")).to_be_hidden()
    open_view(page, served, "model/echo/try")
    expect(page.get_by_role("radio", name="JSON")).to_be_checked()
    expect(page.get_by_role("group", name="Playground")).to_be_hidden()


def test_the_charts_show_the_generation_metrics(page: Any, served: Running) -> None:
    def chart(pattern: str) -> None:
        expect(page.get_by_role("img", name=re.compile(pattern))).to_be_visible()

    open_view(page, served, "model/talker/overview")
    # From here on, the charts count requests.
    chart(r"Requests per second, 10 s mean: 1\.0 \d")
    predict(served, "talker", json={"inputs": "a b", "parameters": {"max_new_tokens": 40}})
    chart(r"Tokens per second, 10 s mean: out [1-9].* in [0-9.]+")
    chart(r"Time to first token, 10 s mean: p99 \d.*s, p50 \d.*s")
    chart(r"Time per output token, 10 s mean: p99 \d.*s, p50 \d.*s")
    chart(r"Sequences, 10 s mean: running [\d.]+, waiting 0")
    chart(r"Cache use, 10 s mean: in use [1-9]")
    open_view(page, served, "model/echo/overview")
    expect_heading(page, "Versions")
    expect(page.get_by_role("heading", name="Text generation")).to_be_hidden()


@pytest.mark.nightly
def test_the_chat_has_no_serious_accessibility_findings(page: Any, served: Running) -> None:
    open_view(page, served, "model/talker/try")
    check_accessibility(page, "an empty chat")
    ask(page, "good day")
    expect(page.get_by_role("log")).to_contain_text("tokens/s")
    check_accessibility(page, "a conversation")
    page.set_viewport_size({"width": 360, "height": 740})
    check_accessibility(page, "narrow", dark=False)
    check_width(page, "a conversation")
    open_view(page, served, "model/talker/overview")
    expect_heading(page, "Text generation")
    check_accessibility(page, "charts")
