"""The report of a benchmark: its files, its charts, and its output on a terminal."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.benchmarked import one_round, point, results, with_trials
from tsx_cli.bench.commands.against import show_against
from tsx_cli.bench.load.configuration import Configuration
from tsx_cli.bench.load.results import (
    OUT_OF_TIME,
    Figure,
    Latency,
    OfferedLoad,
    PairedComparison,
    PinnedCores,
    Prediction,
    Results,
    Round,
    Trial,
    read_results,
)
from tsx_cli.bench.report import show, write_report
from tsx_cli.bench.report.charts import (
    MAX_LOG_RATIO,
    MIN_DRAWN,
    ChartMark,
    Interval,
    Series,
    axis,
    plot,
    ticks,
)
from tsx_cli.bench.report.compare import compare, parse_condition, show_compared
from tsx_cli.bench.report.facts import facts
from tsx_cli.bench.report.figures import charts
from tsx_cli.bench.report.shown import margin, note, shown_point
from tsx_cli.bench.report.tables import csv_rows, headline, tables
from tsx_cli.bench.report.verdict import conclude
from tsx_cli.bench.search.points import cost_per_million, point_of

SCHEMA = Path(__file__).parents[4] / "docs" / "reference" / "bench-results.schema.json"


@pytest.fixture(scope="module")
def measured() -> Results:
    return results()


@pytest.fixture(scope="module")
def report(measured: Results, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("report")
    (directory / "profile").mkdir()
    (directory / "profile" / "flame.svg").write_text("<svg/>")
    (directory / "profile" / "worker.prof").touch()
    assert [file.name for file in write_report(measured, directory)] == [
        "report.html",
        "report.md",
        "results.csv",
        "results.json",
    ]
    return directory


def test_the_results_file_round_trips(measured: Results, report: Path) -> None:
    assert read_results(report / "results.json") == measured


def test_the_page_loads_no_external_files(report: Path) -> None:
    page = (report / "report.html").read_text()
    assert set(re.findall(r'(?:href|src)="([^"]*)"', page)) == {
        "profile/flame.svg",
        "profile/worker.prof",
    }
    assert "(<code>snakeviz profile/worker.prof</code>)" in page
    assert "<script" not in page
    assert "url(" not in page
    assert "prefers-color-scheme: dark" in page


def test_the_page_shows_the_winner_all_charts_and_all_outcomes(report: Path) -> None:
    page = (report / "report.html").read_text()
    for title in (
        "Throughput and latency",
        "Latency distribution",
        "Where the time goes",
        "Batches",
        "One worker without a server",
        "Latency over time",
    ):
        assert f"<h2>{title}</h2>" in page
    assert '<p class="best">cpu, 2 workers, 1 thread, batch 4</p>' in page
    assert "failed: a worker died: out of memory" in page
    assert "not measured: it could not win" in page
    assert "answers differ in 3 of 8" in page
    assert "2 cores, AMD EPYC 7B13" in page
    assert "--batch-sizes 1..32" in page
    assert "batchSize: 4" in page


def test_every_chart_is_valid_svg_with_a_title_per_point(measured: Results) -> None:
    drawings = {chart.title: ElementTree.fromstring(chart.svg) for chart in charts(measured)}
    hints = [element.text or "" for element in drawings["Throughput and latency"].iter("title")]
    assert len(hints) == sum(len(trial.points) for trial in measured.trials)
    assert any(
        hint.startswith("cpu, 2 workers, 1 thread, batch 4\n2 connections: ") for hint in hints
    )
    assert [
        element.text
        for element in drawings["Throughput and latency"].iter("text")
        if element.get("class") == "bound"
    ] == ["p99<100ms"]


def test_the_facts_include_the_servers_resource_usage(measured: Results) -> None:
    with_gpu = measured.model_copy(deep=True)
    for usage in with_gpu.trials[3].usage:
        usage.gpu = 0.8
    assert dict(facts(measured))["server at that load"] == "1.61 cores, 880 MiB at most"
    assert dict(facts(with_gpu))["server at that load"].endswith(", 80% of the GPU")


def test_csv_has_a_row_per_load_or_unmeasured_configuration(
    measured: Results, report: Path
) -> None:
    csv_records = list(csv.DictReader((report / "results.csv").read_text().splitlines()))
    assert len(csv_records) == sum(max(1, len(trial.points)) for trial in measured.trials)
    winner = next(row for row in csv_records if row["winner"] == "true")
    assert (winner["workers"], winner["batch_size"], winner["connections"], winner["holds"]) == (
        "2",
        "4",
        "2",
        "true",
    )
    assert (
        float(winner["throughput_low"])
        < float(winner["throughput"])
        < float(winner["throughput_high"])
    )
    failed = next(row for row in csv_records if row["state"] == "failed")
    assert (failed["workers"], failed["throughput"], failed["note"]) == (
        "16",
        "",
        "failed: a worker died: out of memory",
    )


def test_csv_cells_are_not_formulas(measured: Results, tmp_path: Path) -> None:
    trial = Trial(configuration={}, points=measured.trials[0].points, reason="=1+1")
    formula_results = with_trials(measured, trial, against="=cmd|' /C calc'!A0", slo=None)
    write_report(formula_results, tmp_path)
    assert next(csv_rows(formula_results))["note"] == "=1+1"
    assert "'=1+1" in (tmp_path / "results.csv").read_text()


def test_markdown_has_the_same_figures(report: Path) -> None:
    text = (report / "report.md").read_text()
    assert "Highest throughput within p99\\<100ms: **cpu, 2 workers, 1 thread, batch 4**" in text
    assert "| cpu, 2 workers, 1 thread, batch 4 (winner) | 2 conn. |" in text
    assert "## Mean time of a request" in text
    assert (
        "[profile/flame.svg](profile/flame.svg), [profile/worker.prof](profile/worker.prof) (`snakeviz profile/worker.prof`)"
        in text
    )
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


def test_names_and_errors_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile_results = results()
    hostile_results.model.name = "<script>alert(1)</script>|x"
    hostile_results.why = "</style><img src=x>"
    hostile_results.trials[6].reason = "\x1b[31m<b>|oops|</b>\nsecond line"
    write_report(hostile_results, tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "<script" not in page
    assert "<img" not in page
    assert "\\|oops\\|" in (tmp_path / "report.md").read_text()
    assert "<pre>\x1b[31m&lt;b&gt;|oops|" in page
    show(hostile_results)
    assert "\x1b" not in capsys.readouterr().out


def test_the_terminal_shows_the_winner_and_the_reason(
    measured: Results, capsys: pytest.CaptureFixture[str]
) -> None:
    show(measured)
    output = capsys.readouterr().out
    assert re.search(
        r"^cpu, 2 workers, 1 thread, batch 4 \(winner\) +2 conn\. ", output, re.MULTILINE
    )
    assert re.search(r"^cpu, 1 worker, batch 1 \(baseline\) +1 conn\. ", output, re.MULTILINE)
    assert (
        "Best: cpu, 2 workers, 1 thread, batch 4\n      2 workers with batches of 4 answer the most"
        in output
    )
    assert "Note: the machine was noisy" in output


def plain_lines(text: str) -> list[str]:
    return [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in text.splitlines()]


@pytest.mark.nightly
def test_nothing_is_truncated_on_a_terminal_of_80_columns(
    measured: Results, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    wide_results = measured.model_copy(deep=True, update={"price_per_hour": 1_234.0})
    configuration = Configuration(
        device="cuda", precision="bf16", compiled=True, threads=16, workers=16, batch_size=512
    )
    chosen = wide_results.trials[3].chosen
    assert chosen is not None
    wide_results.trials[3].configuration = configuration.as_json()
    chosen.offered.connections, chosen.throughput.value, chosen.throughput.high = (
        16,
        1_234.0,
        1_356.0,
    )
    chosen.latency.p50_ms, chosen.p99_ms.value, chosen.error_rate = 1_730.4, 12_345.6, 0.0123
    show(wide_results)
    lines = plain_lines(capsys.readouterr().out)
    table = lines[: next(index for index, line in enumerate(lines) if line.startswith("cpu, "))]
    assert max(map(len, table)) <= 80
    figures = r"16 conn\. +1,234 ± 9\.9% +1\.73 s +12\.3 s +1\.23% +278 *$"
    assert any(re.search(figures, line) for line in table), table
    assert all(part in " ".join(table) for part in str(configuration).split())
    conditions = [parse_condition(text) for text in ("throughput<-5%", "p99.9>5%", "errors>1%")]
    show_compared(compare(wide_results, measured, conditions, all_pairs=True))
    lines = plain_lines(capsys.readouterr().out)
    table = lines[: lines.index("(~) is within the noise of the measurements: no real difference.")]
    assert max(map(len, table)) <= 80
    headings = ["configuration", "throughput", "connections", "1,234", "87.7", "p99.9", "errors"]
    assert set(headings) <= set(" ".join(table).split())


def test_a_run_against_a_server_fits_into_80_columns(
    measured: Results, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    measured = with_rates(measured)
    trial = Trial(configuration={}, points=measured.trials[3].points, best=1)
    pins = {"price_per_hour": 0.53, "pinning": PinnedCores(server=[], generator=[1])}
    url = "https://inference.example.com:8443/a/long/prefix/of/the/address"
    show_against(with_trials(measured, trial, against=url, **pins))
    lines = plain_lines(capsys.readouterr().out)
    assert max(map(len, lines)) <= 80
    output = " ".join(" ".join(lines).split())
    for part in (
        "cost/M 2.88",
        "generator 1",
        "knee: 40.0/s holds, 80.0/s does not (p99<100ms)",
        "20.0/s: p50",
    ):
        assert part in output


def trial_out_of_time() -> Trial:
    configuration, predicted = (
        Configuration(workers=2, batch_size=32),
        Prediction(throughput=22855.0, p99_ms=4.71),
    )
    return Trial(
        configuration=configuration.as_json(),
        state="predicted",
        reason=OUT_OF_TIME,
        predicted=predicted,
    )


def test_a_run_that_is_too_short_has_no_winner(
    measured: Results, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unfinished = measured.model_copy(deep=True, update={"winner": None, "faster_unmeasured": 1})
    unfinished.trials.append(trial_out_of_time())
    conclude(unfinished)
    assert unfinished.why.startswith("The time was too short to choose: ")
    assert "such as cpu, 2 workers, batch 32 with about 22,855 requests/s" in unfinished.why
    assert "--resume and a longer --time-limit" in unfinished.why
    show(unfinished)
    output = capsys.readouterr().out
    assert "Best:" not in output
    assert "winner" not in output
    assert re.search(r"^cpu, 2 workers, batch 32 +- +~22,855 +- +~4.71 ms", output, re.MULTILINE)
    write_report(unfinished, tmp_path)
    assert "The time was too short to choose" in (tmp_path / "report.html").read_text()


def test_a_stall_is_reported_next_to_the_percentiles(measured: Results, tmp_path: Path) -> None:
    stalled_results = measured.model_copy(deep=True)
    point = stalled_results.trials[3].chosen
    assert point is not None
    point.rounds[0].stalls, point.rounds[0].corrected_p99_ms = [(1.0, 0.4), (3.0, 0.1)], 312.0
    write_report(stalled_results, tmp_path)
    stalls = "2 stalls, 400 ms at most, and clients that come all the time would have seen a p99 of 312 ms"
    assert stalls in (tmp_path / "report.html").read_text()
    assert stalls in (tmp_path / "report.md").read_text()


def test_the_winner_is_compared_with_the_baseline_by_paired_rounds(
    measured: Results,
) -> None:
    def comparison_text(comparisons: list[PairedComparison]) -> str:
        return dict(headline(measured.model_copy(update={"paired": comparisons})))[
            "compared with the baseline"
        ]

    ratio_text = comparison_text(
        [PairedComparison(first=3, second=1, ratio=1.3, low=1.2, high=1.4, real=True)]
    )
    assert re.fullmatch(r"\d\.\d\d times", ratio_text)
    assert (
        comparison_text(
            [PairedComparison(first=3, second=0, ratio=2.5, low=2.4, high=2.6, real=True)]
        )
        == "2.50 times"
    )
    assert comparison_text(
        [PairedComparison(first=3, second=0, ratio=1.01, low=0.9, high=1.2, real=False)]
    ).endswith(", within the noise")


def test_a_run_without_a_winner_still_has_a_report(
    measured: Results, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = {"winner": None, "why": "", "complete": False}
    empty_run = measured.model_copy(
        update=base | {"trials": [], "baseline": None, "curves": [], "slo": None}
    )
    failed = measured.model_copy(update=base | {"trials": measured.trials[6:], "baseline": None})
    bound_too_low = measured.model_copy(
        update=base
        | {"trials": [trial.model_copy(update={"best": None}) for trial in measured.trials]}
    )
    pages = {}
    for name, outcome in (("nothing", empty_run), ("failed", failed), ("low", bound_too_low)):
        write_report(outcome, tmp_path / name)
        show(outcome)
        pages[name] = (tmp_path / name / "report.html").read_text()
        assert "This run is incomplete" in pages[name]
        assert "This run is incomplete" in capsys.readouterr().out
    assert "Nothing was measured" in pages["nothing"]
    assert "No configuration met the bound" in pages["low"]
    assert "never within p99&lt;100ms" in pages["low"]


def test_a_running_server_is_reported_by_its_address(
    measured: Results, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trial = Trial(configuration={}, points=measured.trials[0].points[:1], best=0)
    url = "http://127.0.0.1:8080"
    server_results = with_trials(measured, trial, against=url, curves=[], why="", slo=None)
    write_report(server_results, tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert '<p class="best">http://127.0.0.1:8080</p>' in page
    assert "1 worker" not in page
    show(server_results)
    assert "http://127.0.0.1:8080" in capsys.readouterr().out


def test_the_documented_schema_matches_the_code() -> None:
    assert json.loads(SCHEMA.read_text()) == Results.model_json_schema(mode="serialization"), (
        "run python scripts/update_docs.py"
    )


def error_bars(svg: str) -> list[str]:
    return [
        element.get("d", "")
        for element in ElementTree.fromstring(svg).iter("path")
        if "error" in element.get("class", "")
    ]


def with_rates(measured: Results) -> Results:
    """Add open-loop points to the winner, which keeps its limits up to 40/s."""
    measured = measured.model_copy(deep=True)
    winner = measured.trials[measured.winner or 0]
    winner.points += [
        point(512, winner.points[position].rounds, rate=rate, bound=90)
        for position, rate in ((0, 20.0), (1, 40.0), (3, 80.0))
    ]
    return measured


def test_every_chart_of_measured_points_has_error_bars(measured: Results) -> None:
    charts_by_title = {chart.title: chart for chart in charts(with_rates(measured))}
    titles = {
        "Throughput and latency",
        "Latency by rate",
        "Latency distribution",
        "Where the time goes",
    }
    for title in {*titles, "One worker without a server"}:
        assert error_bars(charts_by_title[title].svg), title
        assert "Error bars are 95 % intervals" in charts_by_title[title].says
    single_rounds = measured.model_copy(deep=True)
    for trial in single_rounds.trials:
        trial.points = [point(load.offered.connections, load.rounds[:1]) for load in trial.points]
    charts_by_title = {chart.title: chart for chart in charts(single_rounds)}
    assert not [
        title for title in titles & charts_by_title.keys() if error_bars(charts_by_title[title].svg)
    ], "one round has no interval"


def test_error_bars_stay_inside_the_frame_and_above_zero() -> None:
    rounds = [one_round(rate, 10, 0) for rate in (1, 100)]
    wide_interval_point = point(1, rounds)
    assert wide_interval_point.throughput.low == 0
    assert margin(wide_interval_point.throughput) == "± over 100%"
    assert margin(Figure(value=100.0, low=51.0, high=149.0)) == "± 49.0%"
    bar = Interval(wide_interval_point.throughput.low, wide_interval_point.throughput.high)
    for log in (False, True):
        scale = axis("x", [wide_interval_point.throughput.value], log=log, bars=[bar])
        assert scale.low >= 0
        svg = plot(
            "t", scale, scale, [Series("s", "winner", [ChartMark(50, 50, "", False, bar, bar)])]
        )
        (path,) = error_bars(svg)
        positions = [float(number) for number in re.findall(r"(?<![hv-])\d+\.\d", path)]
        assert all(0 <= position <= 480 for position in positions), path


def test_the_latency_by_rate_shows_the_knee(measured: Results) -> None:
    (chart,) = [chart for chart in charts(with_rates(measured)) if chart.title == "Latency by rate"]
    assert "The knee is between 40.0/s, which holds, and 80.0/s, which does not." in chart.says
    assert ElementTree.fromstring(chart.svg).find(".//*[@class='span bad']") is not None
    assert "Latency by rate" not in [chart.title for chart in charts(measured)]


def test_a_line_joins_only_loads_with_the_same_mode_and_arrivals(measured: Results) -> None:
    mixed_results = with_rates(measured)
    line_count = charts(mixed_results)[0].svg.count('class="line"')
    assert line_count == charts(measured)[0].svg.count('class="line"') + 1
    winner = mixed_results.trials[mixed_results.winner or 0]
    constant = [load.model_copy(deep=True) for load in winner.points[-2:]]
    for load in constant:
        load.offered.arrivals = "constant"
    winner.points += constant
    assert charts(mixed_results)[0].svg.count('class="line"') == line_count + 1


def test_latency_over_time_is_drawn_with_the_warm_ups(measured: Results) -> None:
    charts_by_title = {chart.title: chart for chart in charts(measured)}
    latency = ElementTree.fromstring(charts_by_title["Latency over time"].svg)
    assert len(latency.findall(".//*[@class='line']")) == 6, (
        "p50 and p99 of three rounds, not joined"
    )
    assert [element[0].text for element in latency.findall(".//*[@class='span warm']")] == [
        f"warm-up of round {number}" for number in (1, 2, 3)
    ]
    assert "of intervals of 0.5 s" in charts_by_title["Latency over time"].says


def test_disturbed_rounds_are_marked_in_charts_and_tables(
    measured: Results, tmp_path: Path
) -> None:
    disturbed_results = measured.model_copy(deep=True)
    chosen = disturbed_results.trials[3].chosen
    assert chosen is not None
    for round in chosen.rounds:
        round.disturbed = ["other processes used 0.9 cores (limit 0.1)"]
    disturbed_results.tied = [2]
    drawings = {
        chart.title: ElementTree.fromstring(chart.svg) for chart in charts(disturbed_results)
    }
    spans = drawings["Latency over time"].findall(".//*[@class='span disturbed']")
    assert [span[0].text for span in spans] == [
        f"round {number}: other processes used 0.9 cores (limit 0.1)" for number in (1, 2, 3)
    ]
    (dot,) = [
        circle
        for circle in drawings["Throughput and latency"].iter("circle")
        if "faint" in circle.get("class", "")
    ]
    disturbance = "3 of 3 rounds were disturbed: other processes used 0.9 cores (limit 0.1)"
    assert str(dot[0].text).endswith(disturbance)
    write_report(disturbed_results, tmp_path)
    for name in ("report.html", "report.md", "results.csv"):
        assert disturbance in (tmp_path / name).read_text()
    page = (tmp_path / "report.html").read_text()
    assert "3 (3 disturbed)" in page
    assert "cpu, 2 workers, 1 thread, batch 1 (tie)" in page
    chosen.rounds[0].disturbed = []
    assert "disturbed" not in note(disturbed_results.trials[3], disturbed_results), (
        "what was repeated undisturbed does not count"
    )


def test_start_times_and_input_sizes_have_tables(
    measured: Results, report: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, text = (report / "report.html").read_text(), (report / "report.md").read_text()
    for document in (page, text):
        assert "Cold and warm" in document
        assert "8,122 to 9,003 bytes" in document
        assert "66.0 ms" in document
    show(measured)
    output = capsys.readouterr().out
    assert re.search(
        r"^cpu, 2 workers, 1 thread, batch 4 +2\.35 s ± 27\.0% +66\.0 ms +\d",
        output,
        re.MULTILINE,
    )
    assert re.search(r"^8,122 to 9,003 bytes +766 +\d+\.\d ms ± \d+\.\d% +", output, re.MULTILINE)


def test_a_price_adds_the_cost_of_a_million_requests_to_each_row(
    measured: Results, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    priced = measured.model_copy(update={"price_per_hour": 0.53})
    write_report(priced, tmp_path)
    show(priced)
    best = priced.trials[3].chosen
    assert best is not None
    cost = cost_per_million(0.53, best.throughput.value)
    assert cost == pytest.approx(0.53 / 3600 / best.throughput.value * 1e6)
    assert re.search(
        rf"^cpu, 2 workers, 1 thread, batch 4 \(winner\) .* {cost:.2f}$",
        capsys.readouterr().out,
        re.MULTILINE,
    )
    assert f"| {cost:.2f} |" in (tmp_path / "report.md").read_text()
    assert f'<td class="n">{cost:.2f}</td>' in (tmp_path / "report.html").read_text()
    row = next(
        row
        for row in csv.DictReader((tmp_path / "results.csv").read_text().splitlines())
        if row["winner"] == "true"
    )
    assert float(row["cost_per_million"]) == pytest.approx(cost, rel=1e-4)
    write_report(measured, tmp_path)
    assert "cost/M" not in (tmp_path / "report.html").read_text()


VALUES = st.floats(0, 1e7, allow_nan=False)


@given(st.lists(VALUES, max_size=8), st.booleans())
def test_axes_cover_all_values_with_few_ticks(values: list[float], log: bool) -> None:
    scale = axis("x", values, log=log)
    assert scale.low < scale.high
    assert all(value <= scale.high for value in values)
    assert all(
        scale.low <= value for value in values if value > max(MIN_DRAWN, scale.high / MAX_LOG_RATIO)
    )
    tick_values = ticks(scale)
    assert len(tick_values) <= 16
    assert all(scale.low * 0.999 <= value <= scale.high * 1.001 for value, _ in tick_values)


@given(st.lists(st.tuples(VALUES, VALUES), min_size=1, max_size=6))
def test_points_stay_inside_the_frame_of_a_chart(points: list[tuple[float, float]]) -> None:
    marks = [ChartMark(x, y, "<&>", hollow=y > 3) for x, y in points]
    charts_by_title = plot(
        "t",
        axis("x", [x for x, _ in points]),
        axis("y", [y for _, y in points]),
        [Series("s", "winner", marks)],
    )
    for circle in ElementTree.fromstring(charts_by_title).iter("circle"):
        assert 0 <= float(circle.get("cx", "-1")) <= 480
        assert 0 <= float(circle.get("cy", "-1")) <= 300


def warm_medians(results: Results) -> dict[str, str]:
    (table,) = [table for table in tables(results) if table.title == "Cold and warm"]
    return {row[0]: row[-1] for row in table.rows}


def test_a_load_without_responses_is_ignored_in_summaries(measured: Results) -> None:
    failing = measured.model_copy(deep=True)
    trial = failing.trials[0]
    failed_round = Round(
        seconds=1, sent=9, ok=0, errors={"500": 9}, throughput=0, latency=Latency()
    )
    trial.points, trial.best = (
        [*trial.points, point_of(OfferedLoad(connections=64), [failed_round], None)],
        None,
    )
    assert shown_point(trial) == trial.points[0]
    assert (
        warm_medians(failing)["cpu, 1 worker, batch 1"]
        == warm_medians(measured)["cpu, 1 worker, batch 1"]
    )
    assert charts(failing)
