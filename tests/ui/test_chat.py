"""The playground of a model that generates text, and its charts, in a real browser."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import forked
from tests.support.models import make_model
from tests.support.servers import FREE_PORTS, Running
from tests.support.streaming import CONFIG, TALKER
from tests.ui.looking import expect, look
from tests.ui.test_page import _axe, _check


@pytest.fixture(scope="module")
def served(browser: Any, start: Callable[..., Running], store: Path) -> Running:
    make_model(store / "talker.mar", TALKER, config=CONFIG)
    return start(["talker.mar", "echo.mar", *FREE_PORTS])


def ask(page: Any, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.get_by_role("button", name="Send").click()


def test_a_conversation_streams_and_its_code_repeats_it(
    page: Any, served: Running, tmp_path: Path
) -> None:
    look(page, served, "model/talker/try")
    page.get_by_label("System prompt").fill("Be <b>brief</b>.")
    page.get_by_label("Max tokens").fill("3")
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Stop", exact=True).fill("END\n")
    said = page.get_by_role("log", name="Conversation").get_by_role("listitem")
    with page.expect_request(
        lambda request: "/ui/api/predict/talker/1.0/v1/chat/completions" in request.url
    ) as first:
        ask(page, "<i>good</i> day")
    expect(said).to_have_count(2)
    expect(said.last.locator(".said")).to_have_text(
        "<i>good</i> day <i>good</i> "
    )  # as text, and no markup
    expect(said.last).to_contain_text(
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
    expect(said).to_have_count(4)
    roles = [message["role"] for message in json.loads(second.value.post_data)["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    page.get_by_role("link", name="Overview").click()  # the conversation is kept by the page
    page.get_by_role("link", name="Playground").click()
    expect(said).to_have_count(4)
    page.get_by_role("tab", name="openai").click()
    program = page.locator("pre[data-for=openai]").inner_text()
    compile(program, "openai", "exec")
    assert 'client.chat.completions.create(\n    model="talker",' in program
    page.get_by_role("tab", name="curl").click()
    line = page.locator("pre[data-for=curl]").inner_text()
    done = forked.run(
        ["bash", "-c", line],
        cwd=tmp_path,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "data: [DONE]" in done.stdout, done.stderr
    page.get_by_role("button", name="New conversation").click()
    expect(said).to_have_count(0)
    page.reload()
    expect(page.get_by_label("Message")).to_be_visible()
    expect(said).to_have_count(0)


def test_enter_sends_and_breaks_the_line_only_with_shift(page: Any, served: Running) -> None:
    look(page, served, "model/talker/try")
    said = page.get_by_role("log", name="Conversation").get_by_role("listitem")
    message = page.get_by_label("Message")
    message.fill("one")
    message.press("Shift+Enter")
    message.press_sequentially("two")
    expect(message).to_have_value("one\ntwo")
    message.dispatch_event(
        "keydown", {"key": "Enter", "isComposing": True}
    )  # it ends a word of an input method
    expect(message).to_have_value("one\ntwo")
    message.press("Enter")
    expect(said).to_have_count(2)
    expect(said.first).to_contain_text("one\ntwo")
    expect(message).to_have_value("")


def test_stop_ends_the_answer_in_the_worker(page: Any, served: Running) -> None:
    look(page, served, "model/talker/try")
    with httpx.Client(base_url=served.address("predictions"), timeout=60) as client:

        def count() -> int:
            return int(
                client.post("/predictions/talker", json={"inputs": "cancelled"}).json()["cancelled"]
            )

        before = count()
        ask(page, "slow words")
        answer = page.get_by_role("log").get_by_role("listitem").last
        expect(answer.locator(".said")).to_contain_text("slow")
        page.get_by_role("button", name="Stop").click()
        expect(answer).to_contain_text("stopped")
        expect(page.get_by_role("button", name="Stop")).to_be_hidden()
        expect(page.get_by_label("Message")).to_be_focused()
        for _ in range(200):
            if count() > before:
                break
            page.wait_for_timeout(20)
        assert count() == before + 1


def test_what_fails_is_said_and_can_be_sent_again(page: Any, served: Running) -> None:
    look(page, served, "model/talker/try")
    page.get_by_label("Max tokens").fill("5000")
    ask(page, "too much")
    expect(
        page.get_by_role("alert").filter(has_text="max_tokens is more than the context has")
    ).to_be_visible()
    expect(page.get_by_label("Message")).to_have_value("too much")
    page.get_by_label("Max tokens").fill("")
    ask(page, "break it now")
    expect(page.get_by_text("The answer was interrupted: the engine ended")).to_be_visible()
    expect(page.get_by_role("log").get_by_role("listitem").last).to_contain_text("interrupted")
    page.get_by_label("Task").select_option("Continue a text")
    expect(page.get_by_role("heading", name="Continue a text")).to_be_visible()
    expect(page.get_by_label("System prompt")).to_be_hidden()
    ask(page, "once upon")
    expect(page.get_by_role("log").get_by_role("listitem")).to_have_count(2)
    expect(page.locator(".said").last).to_contain_text("once upon once upon")


def test_single_requests_are_there_too_and_all_that_other_models_have(
    page: Any, served: Running
) -> None:
    look(page, served, "model/talker/try")
    page.get_by_role("radio", name="Single request").check()
    expect(page.get_by_role("radio", name="JSON")).to_be_checked()
    expect(page.get_by_role("region", name="Settings")).to_be_hidden()
    look(page, served, "model/echo/try")
    expect(page.get_by_role("radio", name="JSON")).to_be_checked()
    expect(page.get_by_role("group", name="Playground")).to_be_hidden()


def test_the_charts_of_generation_are_those_of_its_metrics(page: Any, served: Running) -> None:
    def chart(pattern: str) -> None:
        expect(page.get_by_role("img", name=re.compile(pattern))).to_be_visible()

    with httpx.Client(base_url=served.address("predictions"), timeout=60) as client:
        look(page, served, "model/talker/overview")
        chart(r"Requests per second, 10 s mean: 1\.0 \d")  # what comes from here on is counted
        client.post(
            "/predictions/talker", json={"inputs": "a b", "parameters": {"max_new_tokens": 40}}
        )
        chart(r"Tokens per second, 10 s mean: out [1-9].* in [0-9.]+")
        chart(r"Time to first token, 10 s mean: p99 \d.*s, p50 \d.*s")
        chart(r"Time per output token, 10 s mean: p99 \d.*s, p50 \d.*s")
        chart(r"Sequences, 10 s mean: running [\d.]+, waiting 0")
        chart(r"Cache use, 10 s mean: in use [1-9]")
        look(page, served, "model/echo/overview")
        expect(page.get_by_role("heading", name="Versions")).to_be_visible()
        expect(page.get_by_role("heading", name="Text generation")).to_be_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_chat_has_no_serious_finding_of_axe(page: Any, served: Running, scheme: str) -> None:
    axe, only = _axe(), "color-contrast" if scheme == "dark" else None
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    look(page, served, "model/talker/try")
    _check(axe, page, "an empty chat", only)
    ask(page, "good day")
    expect(page.get_by_role("log")).to_contain_text("tokens/s")
    _check(axe, page, "a conversation", only)
    page.set_viewport_size({"width": 360, "height": 740})
    _check(axe, page, "narrow", only)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    look(page, served, "model/talker/overview")
    expect(page.get_by_role("heading", name="Text generation")).to_be_visible()
    _check(axe, page, "charts", only)
    page.set_viewport_size({"width": 1280, "height": 900})
