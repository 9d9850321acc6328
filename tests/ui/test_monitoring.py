"""The monitoring of a model on the web page: drift, quality, groups and contested answers."""

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
from tests.ui import monitor_reports
from tests.ui.browser_helpers import (
    check_accessibility,
    check_width,
    click,
    expect,
    expect_text,
    fill,
    open_view,
    predict,
)
from tests.ui.conftest import ECHO
from tsx_runtime.features.monitor.report import MonitorReport, VersionReport
from tsx_runtime.features.rollouts.policy import RolloutPlan
from tsx_runtime.features.rollouts.quality import MetricComparison, MetricValue
from tsx_runtime.features.rollouts.routes import ModelRollout, Numbers

ROUTE = "model/credit/monitor"
PHONE, DESKTOP = {"width": 390, "height": 844}, {"width": 1280, "height": 900}


@pytest.fixture(scope="module")
def served(start: Callable[..., Running], store: Path) -> Running:
    """Start a server with the model of `monitor_reports`."""
    make_model(store / "credit.mar", ECHO, name="credit", version="3.0")
    return start("credit.mar")


def show_report(page: Any, server: Running, report: MonitorReport) -> list[Any]:
    """Open the monitoring of a model as if its process had reported this.

    Returns the bodies of the page's own requests, which grow.
    """
    requests: list[Any] = []

    def respond(route: Any) -> None:
        url, method = route.request.url, route.request.method
        if method != "GET":
            requests.append((method, route.request.post_data_json))
            route.fulfill(
                status=409, json={"code": 409, "message": "The contest c2 is upheld already."}
            )
        elif url.endswith("/contests"):
            route.fulfill(
                json=[json.loads(c.model_dump_json()) for c in monitor_reports.contests()]
            )
        elif "/worst?" in url:
            route.fulfill(json=monitor_reports.worst_answers())
        elif "/requests/" in url:
            route.fulfill(json=monitor_reports.recorded_request())
        else:
            route.fulfill(
                body=report.model_dump_json(by_alias=True), content_type="application/json"
            )

    page.route("**/models/credit/monitor**", respond)
    open_view(page, server, ROUTE)
    return requests


def region(page: Any, name: str) -> Any:
    return page.get_by_role("region", name=name, exact=True)


def test_monitoring_is_turned_on_fed_and_turned_off(page: Any, served: Running) -> None:
    recording = httpx.put(
        f"{served.address('models')}/models/credit/record", json={"share": 100, "answers": True}
    )
    assert recording.status_code == 200
    open_view(page, served, ROUTE)
    expect_text(page, "tsx models monitor credit --share 5%")
    click(page, "Turn on monitoring", exact=True)
    dialog = page.get_by_role("dialog", name="Turn on monitoring")
    fill(dialog, "Percent monitored", "100")
    fill(dialog, "Samples of a window", "50")
    fill(dialog, "Longest window", "soon")
    click(dialog, "Turn on")
    expect(dialog.get_by_role("alert")).to_contain_text("soon")
    fill(dialog, "Longest window", "1d")
    click(dialog, "Turn on")
    expect_text(page, "100 % of the requests, windows of 50 samples or 24 h")
    check_accessibility(page, "without a request")
    shares = [number / 160 for number in range(160)]
    answers = [
        predict(served, "credit", json={"approved": share, "declined": 1 - share})
        for share in shares
    ]
    version = region(page, "Monitored versions").get_by_role("row").nth(1)
    expect(version).to_contain_text("160")
    feedback: list[dict[str, Any]] = [
        {"request_id": answer.headers["x-request-id"], "truth": "approved"} for answer in answers
    ]
    feedback[0]["contest"] = {"reason": "It was not me."}
    reported = httpx.post(f"{served.address('predictions')}/feedback/credit", json=feedback)
    assert reported.json()["accepted"] == 160
    expect(region(page, "Quality by version, with 95 % intervals")).to_contain_text("160")
    expect(region(page, "Worst answers").locator("details").first).to_contain_text(
        "answered declined (100.0 % sure), right is approved"
    )
    contests = region(page, "Contested answers")
    contests.get_by_text("It was not me.").click()
    click(contests, "Show the request")
    expect_text(contests, "Raw request", exact=False)
    click(contests, "Explain")
    expect_text(contests, "Raw explanation", exact=False)
    click(contests, "Answer", exact=True)
    dialog = page.get_by_role("dialog", name="Answer the contest")
    fill(dialog, "Response", "We have looked at it.")
    click(dialog, "Answer")
    expect_text(contests, "We have looked at it.", exact=False)
    expect_text(contests, "upheld", exact=True)
    click(page, "Turn off")
    click(page.get_by_role("dialog"), "Turn off")
    expect_text(page, "tsx models monitor credit --share 5%")


def test_versions_and_the_fields_that_moved_first_are_shown(page: Any, served: Running) -> None:
    show_report(page, served, monitor_reports.full_report())
    rows = region(page, "Monitored versions").get_by_role("row")
    expect(rows.nth(1)).to_contain_text("alarm: 4 fields")
    expect(rows.nth(2)).to_contain_text("no drift")
    expect(rows.nth(3)).to_contain_text("no window yet")
    expect_text(page, "Version 1.0: The archive has no baseline, and no window has ended.")
    fields = region(page, "Drift by field").get_by_role("rowheader")
    assert [text.strip() for text in fields.all_inner_texts()[:4]] == [
        "input.income",
        "input.purpose",
        "input.amount",
        "answer.class",
    ]
    page.get_by_role("radio", name="2.0").press("Space")
    expect(region(page, "Drift by field").get_by_role("row").nth(1)).to_contain_text("steady")
    expect(page.get_by_role("radio", name="2.0")).to_be_focused()


def test_a_field_opens_its_histograms_and_history_by_keyboard(page: Any, served: Running) -> None:
    show_report(page, served, monitor_reports.full_report())
    field = page.get_by_role("button", name="input.income")
    field.press("Enter")
    expect(field).to_have_attribute("aria-expanded", "true")
    for name in ("Baseline", "Last window", "Version before"):
        expect(page.get_by_role("img", name=f"{name}: most values")).to_be_visible()
    history = page.get_by_role("img", name="PSI by window: version 3.0")
    history.press("ArrowLeft")
    history.press("ArrowLeft")
    report = monitor_reports.full_report().versions[0]
    income = next(column for column in report.columns if column.column == "input.income")
    expect(history.locator("xpath=following-sibling::*")).to_contain_text(
        f"{income.history[-2].value:.2f}".rstrip("0")
    )
    page.get_by_role("button", name="input.purpose").click()
    shares = page.get_by_role("list", name="Last window: share of the rows by category")
    expect(shares.get_by_role("listitem")).to_have_count(6)
    field.press("Enter")
    expect(page.get_by_role("img", name="Last window")).to_have_count(0)


def test_quality_is_compared_by_version_and_groups_by_attribute(page: Any, served: Running) -> None:
    show_report(page, served, monitor_reports.full_report())
    quality = region(page, "Quality")
    expect_text(quality, "Version 3.0 is better than 2.0", exact=False)
    expect(region(page, "Quality by version, with 95 % intervals")).to_contain_text(
        "95.7 % (95.1 % to 96.3 %)"
    )
    for chart in ("Accuracy over time", "Calibration"):
        expect(quality.get_by_role("img", name=chart)).to_be_visible()
    expect(region(page, "Classes of version 3.0")).to_contain_text("declined")
    groups = region(page, "Groups")
    expect(region(page, "Groups by sex")).to_contain_text("41.0 % (39.2 % to 42.8 %)")
    expect(region(page, "Differences between groups by sex")).to_contain_text(
        "selection rate of m above f"
    )
    expect_text(groups, "1 group is not shown: fewer than 20 requests.")
    expect_text(groups, re.compile("above 18-25; may be chance"))


def test_a_contest_can_be_corrected_once(page: Any, served: Running) -> None:
    requests = show_report(page, served, monitor_reports.full_report())
    contests = region(page, "Contested answers")
    contests.get_by_text("The debt that was counted").click()
    expect_text(contests.locator("details[open]"), "The model answered declined.")
    click(contests, "Answer", exact=True)
    dialog = page.get_by_role("dialog", name="Answer the contest")
    dialog.get_by_label("Decision").select_option("corrected")
    fill(dialog, "Right answer", "approved")
    fill(dialog, "Response", "The debt was another person's.")
    click(dialog, "Answer")
    expect(dialog.get_by_role("alert")).to_have_text("The contest c2 is upheld already.")
    response = "The debt was another person's."
    body = {"state": "corrected", "response": response, "truth": "approved"}
    assert requests == [("POST", body)]
    page.keyboard.press("Escape")
    contests.get_by_text("I have repaid the loan of 2024.").click()
    expect_text(contests, "The right answer is approved.", exact=False)
    worst = region(page, "Worst answers")
    worst.get_by_text("answered approved (99.0 % sure), right is declined").click()
    expect_text(worst, "Raw request", exact=False)


def test_what_is_missing_is_named_with_the_next_command(page: Any, served: Running) -> None:
    config = monitor_reports.CONFIG.model_copy(update={"groups": ()})
    version = VersionReport(version="3.0", samples=312, window_samples=312)
    report = MonitorReport(model="credit", monitoring=True, config=config, versions=[version])
    show_report(page, served, report)
    expect_text(region(page, "Drift"), re.compile("312 of 1,000 samples"))
    commands = {
        "make a baseline": "tsx monitor baseline credit.mar --input train.csv",
        "report the truth": "tsx feedback truth.csv --model credit",
        "compare groups": "tsx models monitor credit --file monitor.yaml",
    }
    for label, command in commands.items():
        expect(page.get_by_label(label, exact=True)).to_have_text(command)
    expect(region(page, "Drift by field")).to_be_hidden()


def test_a_rollout_shows_its_metric_and_its_guards(page: Any, served: Running) -> None:
    counts = {"requests": 900, "errors": 0, "error_rate": 0.0, "p50_ms": 2.0, "p99_ms": 5.0}
    known = MetricValue(value=0.957, low=0.943, high=0.968, answers=820)
    plan = RolloutPlan(version="3.0", metric="accuracy", guards=("drift<0.2",))
    rollout = ModelRollout(
        model="credit",
        status="running",
        old="2.0",
        plan=plan,
        step=1,
        share=plan.steps[0],
        seconds=60,
        reason="waiting",
        began=monitor_reports.NOW,
        changed=monitor_reports.NOW,
        new_counts=Numbers.model_validate(counts),
        old_counts=Numbers.model_validate(counts),
        metric=MetricComparison(
            metric="accuracy",
            margin=0.01,
            new=known,
            old=known.model_copy(update={"value": 0.938}),
            difference=MetricValue(value=0.019, low=0.006, high=0.032, answers=820),
            verdict="kept",
            reason="",
        ),
        log=[],
    )
    body = rollout.model_dump_json()
    page.route(
        "**/models/credit/rollout",
        lambda route: route.fulfill(body=body, content_type="application/json"),
    )
    open_view(page, served, "model/credit/traffic")
    panel = region(page, "Rollout")
    expect_text(panel, "Guards: drift<0.2.")
    rows = region(page, "The accuracy since the rollout began").get_by_role("row")
    expect(rows.nth(1)).to_contain_text("95.7 % (94.3 % to 96.8 %)")
    expect(rows.nth(3)).to_contain_text("difference")


@pytest.mark.nightly
def test_the_view_is_accessible_and_fits_a_phone(page: Any, served: Running) -> None:
    show_report(page, served, monitor_reports.full_report())
    for field in ("input.income", "input.purpose"):
        page.get_by_role("button", name=field).click()
    check_accessibility(page, "monitoring")
    check_width(page, "monitoring")
    page.set_viewport_size(PHONE)
    check_accessibility(page, "monitoring on a phone")
    check_width(page, "monitoring on a phone")
    region(page, "Contested answers").get_by_text("The debt that was counted").click()
    click(page, "Answer", exact=True)
    check_accessibility(page, "the answer to a contest")
    page.set_viewport_size(DESKTOP)
