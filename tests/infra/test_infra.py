"""Files in infra: rules and panels for existing metrics, the compose file, and KServe's runtime."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from prometheus_client import ProcessCollector

from tests.kit.jobs import FakeJob
from tests.support.batches import count
from tsx_archiver.metadata.slo import latency_target
from tsx_cli.deploy.kubernetes.resources import manifests
from tsx_cli.deploy.spec import DeploySpec
from tsx_runtime.core.models.latency_curve import LatencyCurve
from tsx_runtime.core.telemetry.histogram import SHOWN_BOUNDS
from tsx_runtime.core.telemetry.version_stats import Stats
from tsx_runtime.core.workers.instance import ResourceUsage
from tsx_runtime.core.workers.worker import WorkerState
from tsx_runtime.features.cache.feature import CacheFeature
from tsx_runtime.features.jobs.job_stats import JobStats
from tsx_runtime.features.jobs.metrics import JobReading, add_jobs
from tsx_runtime.features.jobs.storage.store import JobRecord
from tsx_runtime.features.monitor.messages import VersionState
from tsx_runtime.features.monitor.metrics import add_process, add_state
from tsx_runtime.features.slo.attainment import Attainment
from tsx_runtime.features.slo.control import SloControl
from tsx_runtime.features.slo.dispatcher import SloDispatcher
from tsx_runtime.features.slo.feature import SloFeature
from tsx_runtime.metrics.collection import Reading, fill, fill_handler_metrics
from tsx_runtime.metrics.exposition import Families
from tsx_runtime.metrics.gpu import Gpu
from tsx_runtime.metrics.host import read_system
from tsx_runtime.metrics.response_counts import ResponseCounts
from tsx_runtime.settings.schema import Settings
from tsx_runtime.wire import TIMES

INFRA = Path(__file__).parents[2] / "infra"
RULES = INFRA / "prometheus" / "tsx.rules.yml"
RULES_TESTS = INFRA / "prometheus" / "tsx.rules.test.yml"
DASHBOARD = json.loads((INFRA / "grafana" / "dashboards" / "tsx.json").read_text())
COMPOSE = yaml.safe_load((INFRA / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
GENERATION = dict.fromkeys(
    ["time_to_first_token_seconds", "time_per_output_token_seconds"], "histogram"
)
GENERATION |= dict.fromkeys(
    ["prompt_tokens_total", "cached_tokens_total", "tokens_total"], "counter"
)
GENERATION |= dict.fromkeys(["running_sequences", "waiting_sequences", "cache_use_ratio"], "gauge")
PROMETHEUS_LABELS = {"instance", "job"}  # labels that Prometheus itself adds

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="needs promtool, which scripts/install-promtool installs",
)


def promtool(*arguments: str, cwd: Path) -> str:
    result = subprocess.run(
        ["promtool", *arguments], cwd=cwd, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.nightly
@pytest.mark.usefixtures("processes")
@needs_promtool
def test_the_alert_rules_pass_their_tests() -> None:
    assert "SUCCESS" in promtool("test", "rules", RULES_TESTS.name, cwd=RULES.parent)


@pytest.mark.usefixtures("processes")
@needs_promtool
def test_prometheus_accepts_its_configuration(tmp_path: Path) -> None:
    text = (INFRA / "prometheus" / "prometheus.yml").read_text()
    (tmp_path / "token").write_text("secret")
    text = text.replace("/etc/prometheus/tsx.rules.yml", str(RULES)).replace(
        "/run/secrets/management_token", str(tmp_path / "token")
    )
    (tmp_path / "prometheus.yml").write_text(text)
    promtool("check", "config", "prometheus.yml", cwd=tmp_path)


def test_each_kind_of_alert_has_a_test() -> None:
    tests = yaml.safe_load(RULES_TESTS.read_text())["tests"]
    tested = {case["alertname"] for test in tests for case in test["alert_rule_test"]}
    assert {
        "TsxErrorBudgetBurnsFast",
        "TsxLatencyBudgetBurnsFast",
        "TsxQueueSaturated",
        "TsxCrashLoop",
        "TsxNoWorkerReady",
        "TsxSloBudgetBurnsFast",
        "TsxModelDrifts",
        "TsxAccuracyFell",
        "TsxMonitoringDropsSamples",
        "TsxMonitorDown",
    } <= tested
    assert tested <= {rule.get("alert") for rule in rules()}


def test_alerts_have_a_severity_and_a_description() -> None:
    for rule in rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("page", "ticket"), rule
            assert rule["annotations"]["summary"], rule
            assert rule["annotations"]["description"], rule


def rules() -> list[dict[str, Any]]:
    return [
        rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    ]


def panels() -> list[dict[str, Any]]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[str]:
    yield from (rule["expr"] for rule in rules())
    yield from (target["expr"] for panel in panels() for target in panel["targets"])


class FakeVersion(SimpleNamespace):
    """A version that features can use as a key."""

    __hash__ = object.__hash__  # type: ignore[assignment]


@pytest.fixture(scope="module")
def rendered() -> dict[str, set[str]]:
    """Return the labels of each sample of a server by name."""
    stats = Stats()
    count(stats, (1.0, 1.0, 2.0), [FakeJob(arrived=1.0)], TIMES.pack(1.0, 1.0, 0.1, 0.1, 0.1))
    stats.refusals["QueueFull"] = 1
    labels = {"ModelName": "m", "Level": "Model", "adapter": "", "worker": "9000"}
    for name, kind in GENERATION.items():
        stats.add_handler_metrics(
            [
                {
                    "name": f"tsx_generation_{name}",
                    "type": kind,
                    "unit": "",
                    "value": 1.0,
                    "dimensions": labels,
                }
            ]
        )
    worker = SimpleNamespace(
        id="9000", state=WorkerState.READY, load_seconds=1.0, forms_passed_over=("why",)
    )
    cache, slo = CacheFeature(Mock()), SloFeature(Mock())
    version = FakeVersion(
        name="m",
        version="1",
        stats=stats,
        workers=[worker],
        pending=0,
        queue_capacity=100,
        in_flight=0,
        forms={"reference": 1},
        features=[cache, slo],
        dispatcher=None,
        current_limits={},
    )
    control = SloControl(latency_target("p99<50ms"), LatencyCurve(0.99))
    dispatcher = Mock(spec=SloDispatcher, control=control, attainment=Attainment())
    other = FakeVersion(**vars(version) | {"version": "2", "dispatcher": dispatcher})
    cache.caches[other] = SimpleNamespace(hits=1, misses=1, evictions=1, size=1)  # type: ignore[index, assignment]
    reading = Reading(
        "host",
        [SimpleNamespace(versions={"1": version, "2": other})],  # type: ignore[list-item]  # of a model, all that is read
        ResponseCounts(),
        read_system(),
        {0: Gpu("0", "GPU-1", 1, 1, 1, 2, {1: 1})},
        usage={"9000": ResourceUsage((1,), 1, 1.0, 1)},
        process=list(ProcessCollector(registry=None).collect()),
        shares={"m": {"1": 1.0}},
    )
    families, labels_by_name = Families(), dict[str, set[str]]()
    list(fill(families, reading))
    list(fill_handler_metrics(families, reading))
    model_labels = {"model_name": "m", "model_version": "1", "hostname": "host"}
    state = VersionState("m", "1", 1, 1, 0.1, ["input.age"], {"input.age": 0.1}, 1, 0.9, 0.1)
    add_state(families, state, model_labels)
    add_process(families, Mock(samplers={"m": Mock(dropped=Counter())}), "host")
    add_jobs(families, JobReading(job_stats(), {}, {("m", "queued"): 1}, {"m": 1.0}), "host")
    for family in families.collect():
        for sample in family.samples:
            labels_by_name.setdefault(sample.name, set()).update(sample.labels)
    return labels_by_name


def job_stats() -> JobStats:
    stats = JobStats()
    stats.count_answer(
        JobRecord(1, "j", "done", "m", "", 0, "", "", 0, 1, 200, 1.0, 2.0, None, None, None, ""),
        200,
    )
    return stats


def test_rules_and_panels_use_existing_metrics(rendered: dict[str, set[str]]) -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    unknown = (
        {name for expression in expressions() for name in names(expression)}
        - set(rendered)
        - recorded
        - {"up"}
    )
    assert not unknown
    assert len({name for expression in expressions() for name in names(expression)}) > 25


def test_rules_and_panels_select_by_existing_labels(rendered: dict[str, set[str]]) -> None:
    for expression in expressions():
        for name, selector in re.findall(r"([A-Za-z_:]\w*)\{([^}]*)\}", expression):
            used_labels = set(re.findall(r"(\w+)\s*[=!]~?", selector))
            if name in rendered:
                assert used_labels <= rendered[name] | PROMETHEUS_LABELS, expression


def test_bucket_limits_in_expressions_exist_in_the_histogram() -> None:
    used_limits = {
        float(bound)
        for expression in expressions()
        for bound in re.findall(r'le="([^"]+)"', expression)
    }
    assert used_limits
    assert used_limits <= set(SHOWN_BOUNDS)


def names(expression: str) -> set[str]:
    """Return the metrics in a PromQL expression."""
    text = re.sub(r'"[^"]*"', "", expression)
    text = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\boffset\s+\w+", " ", text)
    text = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\s*(\([^)]*\))?", " ", text)
    tokens = re.findall(r"[A-Za-z_:][\w:]*(?!\w)(?!\s*\()", text)
    return {name for name in tokens if name not in ("and", "or", "unless", "bool", "le")}


def test_metric_names_are_parsed_from_expressions() -> None:
    expression = 'sum by (a, b) (rate(x_total{le="y"}[5m])) / on (a) group_left w:r5m{c=~"$d"} > 14.4 * 0.001 and max(z) == 0'
    assert names(expression) == {"x_total", "w:r5m", "z"}


def test_the_dashboard_is_complete() -> None:
    assert DASHBOARD["uid"] == "tsx"
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert all(panel["title"] and panel["targets"] for panel in panels())
    assert {variable["name"] for variable in DASHBOARD["templating"]["list"]} == {
        "datasource",
        "model",
        "version",
    }
    assert all(
        target["datasource"]["uid"] == "${datasource}"
        for panel in panels()
        for target in panel["targets"]
    )


def test_the_compose_file_publishes_only_to_this_machine() -> None:
    ports = [port for service in SERVICES.values() for port in service["ports"]]
    assert {port.split(":")[1] for port in ports} == {"8080", "8081", "8082", "9090", "3000"}
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_the_compose_file_rotates_logs_and_limits_processes() -> None:
    assert all(
        service["logging"]["options"] == {"max-size": "20m", "max-file": "5"}
        for service in SERVICES.values()
    )
    assert SERVICES["tsx"]["pids_limit"] == 4096


def test_mounts_of_the_compose_file_exist() -> None:
    mounts = [mount.split(":") for service in SERVICES.values() for mount in service["volumes"]]
    for source, target, *_ in mounts:
        if source.startswith("./"):
            assert source == "./models" or (INFRA / source).exists(), source
        else:
            assert source in COMPOSE["volumes"], source
        assert target.startswith("/")
    provider = yaml.safe_load(
        (INFRA / "grafana" / "provisioning" / "dashboards" / "tsx.yaml").read_text()
    )["providers"][0]
    assert provider["options"]["path"] in {target for _, target, *_ in mounts}
    source = yaml.safe_load(
        (INFRA / "grafana" / "provisioning" / "datasources" / "prometheus.yaml").read_text()
    )["datasources"][0]
    assert source["url"] == "http://prometheus:9090"


def test_the_compose_file_uses_existing_settings() -> None:
    environment = SERVICES["tsx"]["environment"]
    names = {name.removeprefix("TSX_").lower() for name in environment}
    assert names <= set(Settings.model_fields)
    settings = Settings.model_validate(
        {
            "metrics_address": environment["TSX_METRICS_ADDRESS"],
            "model_store": environment["TSX_MODEL_STORE"],
            "load_models": ["all"],
        }
    )
    config = yaml.safe_load((INFRA / "prometheus" / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    assert job["job_name"] == "tsx"  # alerts and panels use this name
    assert job["static_configs"][0]["targets"] == [
        f"tsx:{settings.metrics_address.rpartition(':')[2]}"
    ]
    assert job["authorization"]["credentials_file"] == "/run/secrets/management_token"
    assert COMPOSE["secrets"]["management_token"]["environment"] == "TSX_MANAGEMENT_TOKEN"
    assert {"TSX_INFERENCE_TOKEN", "TSX_MANAGEMENT_TOKEN"} <= set(environment)


def test_the_kserve_runtime_equals_that_of_tsx_deploy() -> None:
    text = (INFRA / "kserve" / "serving-runtime.yaml").read_text()
    (runtime,) = yaml.safe_load_all(text)
    kserve = {"kserve": True, "storage": "s3://models/digits"}
    spec = DeploySpec.model_validate(
        {"name": "a", "target": "kubernetes", "model": "a.mar", "kubernetes": kserve}
    )
    assert runtime == manifests(spec, runtime["spec"]["containers"][0]["image"], {})[0]
