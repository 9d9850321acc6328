"""Traces of a real server and its workers at an OTLP collector, including a handler's spans."""

from __future__ import annotations

import logging
import time
from itertools import pairwise
from typing import Any

import grpc
import httpx
import pytest

from tests.support.collector import Collector, Span, collector
from tests.support.models import make_model, make_war
from tests.support.servers import FREE_GRPC_PORTS, FREE_PORTS, serving
from tsx_runtime.core.telemetry.tracing import Span as OwnSpan
from tsx_runtime.errors import SettingError
from tsx_runtime.features.tracing import otlp
from tsx_runtime.features.tracing.settings import TracingSettings
from tsx_runtime.grpc.protos.inference_pb2 import PredictionResponse, PredictionsRequest

# A handler that creates its own spans and reads the headers of a request.
HANDLER = """
import os
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator


class Handler:
    def initialize(self, context):
        provider = TracerProvider(resource=Resource({"service.name": "mine"}))
        provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter(os.environ["COLLECTOR"] + "/v1/traces")))
        self.tracer = provider.get_tracer("mine")

    def preprocess(self, data):
        return [bytes(row.get("body") or row["data"]) for row in data]

    def inference(self, data):
        headers = {"traceparent": self.context.get_request_header(0, "traceparent")}
        if headers["traceparent"] is None:
            return data
        with self.tracer.start_as_current_span("my step", TraceContextTextMapPropagator().extract(headers)):
            if data == [b"bad"]:
                raise ValueError("no such image")
            return [headers["traceparent"].encode() for _ in data]

    def postprocess(self, data):
        return [part.decode() for part in data]

    def handle(self, data, context):
        self.context = context
        return self.postprocess(self.inference(self.preprocess(data)))
"""
FUNCTIONS = """
def shout(data, context):
    return None if data is None else [bytes(row.get("body") or b"") + b"!" for row in data]
"""
Reported = tuple[Collector, dict[str, Any]]
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"
STEPS = ["preprocess", "inference", "postprocess"]


def trace_id(number: int) -> str:
    return f"{number:032x}"


def parent(number: int, flags: str = "01") -> dict[str, str]:
    return {"traceparent": f"00-{trace_id(number)}-{SPAN}-{flags}"}


def ask_by_grpc(target: str, model: str, metadata: dict[str, str]) -> str:
    with grpc.insecure_channel(target) as channel:
        call = channel.unary_unary(
            "/org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions",
            PredictionsRequest.SerializeToString,
            PredictionResponse.FromString,
        )
        answer = call(
            PredictionsRequest(model_name=model, input={"data": b"x"}),
            metadata=list(metadata.items()),
            timeout=60,
        )
        return bytes(answer.prediction).decode()


@pytest.fixture(scope="module")
def reported(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Reported:
    """Send requests over all lanes; return the collector and the answers."""
    directory = tmp_path_factory.mktemp("otlp")
    make_model(directory / "mine.mar", HANDLER, version="2.5")
    make_war(
        directory / "flow.war", "models: {say: {url: mine.mar}}\ndag: {say: [shout]}", FUNCTIONS
    )
    answers: dict[str, Any] = {}
    with collector() as received:
        sets = [f"otlp_endpoint={received.url}", "trace_share=0", f"model_store={directory}"]
        settings = (f"--set={setting}" for setting in sets)
        arguments = ["serve", "mine.mar", "flow.war", *FREE_PORTS, *FREE_GRPC_PORTS, *settings]
        variables = {"COLLECTOR": received.url, "TSX_CACHE_DIR": str(directory / "cache")}
        with serving(arguments, directory, variables) as server:
            with httpx.Client(base_url=server.address("predictions"), timeout=60) as client:

                def post(
                    path: str = "/predictions/mine", content: Any = b"x", **headers: str
                ) -> httpx.Response:
                    return client.post(path, content=content, headers=headers)

                answers["before"] = time.time_ns()
                url = "/predictions/mine?a=b"
                answers["fast"] = post(url, traceparent=PARENT, tracestate="a=1,b=2")
                answers["chunked"] = post(content=iter([b"x"]), **parent(2))
                answers["unsampled"] = post(**parent(3, "00"))
                answers["untraced"] = post()
                answers["bad"] = post(content=b"bad", **parent(4))
                answers["unknown"] = post("/predictions/nobody", **parent(5))
                answers["flow"] = post("/wfpredict/flow", **parent(6))
            answers["grpc"] = ask_by_grpc(server.address("gRPC predictions"), "mine", parent(7))
            assert server.stop() == 0
            answers["log"] = server.log
    return received, answers


@pytest.fixture(scope="module")
def received(reported: Reported) -> Collector:
    return reported[0]


@pytest.fixture(scope="module")
def answers(reported: Reported) -> dict[str, Any]:
    return reported[1]


def by_name(spans: list[Span]) -> dict[str, Span]:
    assert len({span.name for span in spans}) == len(spans), [span.name for span in spans]
    return {span.name: span for span in spans}


def test_a_fast_lane_request_has_a_span_per_stage_in_order(
    received: Collector, answers: dict[str, Any]
) -> None:
    spans = by_name(received.trace(TRACE))
    request, handler = spans["POST /predictions/{model}"], spans["handler"]
    assert set(spans) == {request.name, "queue", "batch wait", "handler", *STEPS, "my step"}
    assert (request.parent_id, request.kind, request.service) == (SPAN, 2, "tsx")
    assert all(
        spans[name].parent_id == request.span_id for name in ("queue", "batch wait", "handler")
    )
    assert all(spans[name].parent_id == handler.span_id for name in STEPS)
    stages = [spans[name] for name in ("queue", "batch wait", "handler")]
    assert request.start == stages[0].start
    assert all(first.end == next_span.start for first, next_span in pairwise(stages))
    assert stages[-1].end <= request.end
    steps = [
        handler.start,
        *(time for name in STEPS for time in (spans[name].start, spans[name].end)),
        handler.end,
    ]
    assert steps == sorted(steps)
    assert answers["before"] < request.start < request.end < answers["before"] + 60e9
    assert {span.state for span in spans.values() if span.service == "tsx"} == {"a=1,b=2"}
    assert not any(span.is_error for span in spans.values())


def test_a_handlers_own_span_joins_the_trace(received: Collector, answers: dict[str, Any]) -> None:
    spans = by_name(received.trace(TRACE))
    assert answers["fast"].text == f"00-{TRACE}-{spans['handler'].span_id}-01"
    span, inference = spans["my step"], spans["inference"]
    assert (span.parent_id, span.service) == (spans["handler"].span_id, "mine")
    # The two processes read different clocks.
    assert inference.start - 1_000_000 <= span.start <= span.end <= inference.end + 1_000_000


def test_a_span_has_attributes_of_its_request_and_model(
    received: Collector, answers: dict[str, Any]
) -> None:
    spans = by_name(received.trace(TRACE))
    attributes = spans["POST /predictions/{model}"].attributes
    expected = {
        "http.request.method": "POST",
        "http.route": "/predictions/{model}",
        "http.response.status_code": 200,
        "url.path": "/predictions/mine",
        "url.scheme": "http",
        "network.protocol.version": "1.1",
        "client.address": "127.0.0.1",
        "tsx.model.name": "mine",
        "tsx.model.version": "2.5",
        "tsx.request.id": answers["fast"].headers["x-request-id"],
    }
    assert attributes.items() >= expected.items()
    assert attributes["user_agent.original"].startswith("python-httpx/")
    assert spans["handler"].attributes == {"tsx.batch.size": 1}


def test_both_lanes_report_the_same_spans(received: Collector, answers: dict[str, Any]) -> None:
    fast_spans, chunked = by_name(received.trace(TRACE)), by_name(received.trace(trace_id(2)))
    assert set(fast_spans) == set(chunked)
    varying_attributes = {"client.port", "tsx.request.id"}
    for name in fast_spans:
        attributes, chunked_attributes = fast_spans[name].attributes, chunked[name].attributes
        assert {
            key: value for key, value in attributes.items() if key not in varying_attributes
        } == {
            key: value for key, value in chunked_attributes.items() if key not in varying_attributes
        }
    assert (
        chunked["POST /predictions/{model}"].attributes["tsx.request.id"]
        == answers["chunked"].headers["x-request-id"]
    )


def test_requests_without_a_sampled_trace_are_not_traced(
    received: Collector, answers: dict[str, Any]
) -> None:
    # The header is passed on unchanged; therefore the handler's own calls are not traced either.
    assert answers["unsampled"].text == parent(3, "00")["traceparent"]
    assert [span.service for span in received.trace(trace_id(3))] in ([], ["mine"])
    assert answers["untraced"].text == "x"
    known_traces = {TRACE, *map(trace_id, (2, 4, 5, 6, 7))}
    assert {span.trace_id for span in received.spans if span.service == "tsx"} == known_traces


def test_an_error_marks_the_affected_spans(received: Collector, answers: dict[str, Any]) -> None:
    spans = {span.name: span for span in received.trace(trace_id(4))}
    assert answers["bad"].status_code == 500
    assert spans["POST /predictions/{model}"].is_error
    assert spans["handler"].is_error
    assert not spans["queue"].is_error
    (span,) = received.trace(trace_id(5))
    assert (span.attributes["http.response.status_code"], span.is_error) == (404, False)


def test_workflow_node_spans_are_children_of_the_request(
    received: Collector, answers: dict[str, Any]
) -> None:
    spans = received.trace(trace_id(6))
    request = next(span for span in spans if span.name == "POST /wfpredict/{workflow}")
    nodes = {span.name: span for span in spans if span.name.startswith("node ")}
    assert {node.parent_id for node in nodes.values()} == {request.span_id}
    assert set(nodes) == {"node say", "node shout"}
    handlers = {span.parent_id: span for span in spans if span.name == "handler"}
    assert set(handlers) == {node.span_id for node in nodes.values()}
    assert (
        answers["flow"].text
        == f"00-{trace_id(6)}-{handlers[nodes['node say'].span_id].span_id}-01!"
    )
    assert nodes["node say"].end <= nodes["node shout"].start
    assert nodes["node say"].attributes["tsx.model.name"] == "flow__say"


def test_a_grpc_call_has_a_span_with_its_method_name(
    received: Collector, answers: dict[str, Any]
) -> None:
    spans = by_name(received.trace(trace_id(7)))
    call = spans["org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions"]
    assert (call.parent_id, call.kind) == (SPAN, 2)
    assert (
        call.attributes.items()
        >= {"rpc.system": "grpc", "rpc.method": "Predictions", "rpc.grpc.status_code": 0}.items()
    )
    assert (call.attributes["tsx.model.name"], call.attributes["tsx.model.version"]) == (
        "mine",
        "2.5",
    )
    assert set(spans) == {call.name, "queue", "batch wait", "handler", *STEPS, "my step"}
    assert answers["grpc"] == f"00-{trace_id(7)}-{spans['handler'].span_id}-01"


def test_the_log_contains_the_collector_address(
    received: Collector, answers: dict[str, Any]
) -> None:
    assert received.paths == {"/v1/traces"}
    assert f"requests are traced to {received.url}" in answers["log"]


SPAN_OF_OURS = OwnSpan(
    1, 2, 0, False, "a", "server", time.monotonic(), time.monotonic(), {}, "", ""
)


@pytest.mark.slow
def test_opentelemetry_variables_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    with collector() as received:
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": received.url, "OTEL_SERVICE_NAME": "ours"}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with otlp.tracing(TracingSettings(trace_share=0.5), environment) as tracer:
            assert tracer is not None
            assert tracer.sampling_rate == 0.5
            tracer.emit(lambda: [SPAN_OF_OURS])
        assert [(span.name, span.service) for span in received.spans] == [("a", "ours")]
    for disabling_variable in ({"OTEL_SDK_DISABLED": "true"}, {"OTEL_TRACES_EXPORTER": "none"}):
        with otlp.tracing(TracingSettings(), environment | disabling_variable) as tracer:
            assert tracer is None
    with otlp.tracing(TracingSettings(), {}) as tracer:
        assert tracer is None


def test_a_missing_otlp_extra_prevents_the_start_only_for_a_setting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def raise_missing(endpoint: str | None) -> None:
        raise ModuleNotFoundError("No module named 'opentelemetry'", name="opentelemetry")

    monkeypatch.setattr(otlp, "Sender", raise_missing)
    with (
        pytest.raises(SettingError, match="pip install 'tsx-serve\\[otel\\]'"),
        otlp.tracing(TracingSettings(otlp_endpoint="http://a:1"), {}),
    ):
        pass
    with (
        caplog.at_level(logging.WARNING),
        otlp.tracing(TracingSettings(), {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1"}) as tracer,
    ):
        assert tracer is None
    assert "pip install 'tsx-serve[otel]'" in caplog.text


def test_the_traces_path_is_appended_once() -> None:
    assert (
        otlp.traces_url("http://host:4318/")
        == otlp.traces_url("http://host:4318/v1/traces")
        == "http://host:4318/v1/traces"
    )
    assert otlp.traces_url("https://host/some/base") == "https://host/some/base/v1/traces"


def test_a_missing_collector_does_not_delay_spans_or_the_stop(
    free_ports: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otlp, "FLUSH_TIMEOUT_S", 0.1)
    (port,) = free_ports(1)
    sender = otlp.Sender(otlp.traces_url(f"http://127.0.0.1:{port}"))
    for _ in range(10_000):  # more spans than the queue holds
        sender.emit(lambda: [SPAN_OF_OURS])
    sender.close()
