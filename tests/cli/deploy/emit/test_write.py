"""`--emit`: files that are valid for each tool and do not overwrite foreign files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from tests.support.deploying import FACTS, HANDLER, LOCAL, a_spec
from tests.support.models import make_model
from tests.support.wheels import make_wheel
from tsx_archiver.metadata.forms import FormRecord
from tsx_cli.common.failure import UsageError
from tsx_cli.deploy.container.resources import run_arguments
from tsx_cli.deploy.emit.render import emit
from tsx_cli.deploy.engine.facts import Facts
from tsx_cli.deploy.image import local
from tsx_cli.deploy.image.recipe import recipe
from tsx_cli.deploy.spec import DeploySpec
from tsx_cli.main import main

LOCKS = {"locked-base.txt", "locked-lambda.txt", "locked-sbom.txt"}
ROLE = "arn:aws:iam::123456789012:role/endpoint"
HOST = "123456789012.dkr.ecr.eu-central-1.amazonaws.com"

CONTAINERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gpu": {
        "container": {"gpus": 2, "cpus": 1.5, "memory": "8g"},
        "env": {"TSX_LOG_FORMAT": "json", "PRICE": "5$"},
    },
    "open": {
        "container": {"host": "0.0.0.0", "port": 80},
        "build": {"packages": ["gcc", "libgl1"], "extras": ["grpc"]},
    },
    "given": {"image": "registry.example.com/digits:1"},
    "six": {
        "container": {"host": "::1"},
        "build": {"base": "debian:13", "torch": "2.8.0", "torch_index": ""},
    },
}
CLUSTERS: dict[str, dict[str, Any]] = {
    "plain": {"repository": "registry.example.com/digits"},
    "kserve": {"kubernetes": {"kserve": True, "storage": "s3://models/digits", "gpus": 1}},
    "guarded": {
        "kubernetes": {
            "allow_from": "shop,search", "metrics_from": "monitoring", "tolerations": "pool=models:NoSchedule,spot", "gpus": 1,
            "node_selector": {"disk": "ssd"}, "secrets": {"HF_TOKEN": "hub/token"}, "monitor_labels": {"release": "prometheus"},
        },
    },
}  # fmt: skip
STACKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "whole": {
        "image": f"{HOST}/tsx@sha256:" + "0" * 64,
        "canary": {"percent": 10, "alarms": ["5xx>0", "p95>300ms", "theirs"]},
        "sagemaker": {"autoscaling": {"max": 3}, "data_capture": {"to": "s3://b/c"}, "bucket": "own", "subnets": ["subnet-1a2b3c4d"],
                      "security_groups": ["sg-1a2b3c4d"]},
        "env": {"TSX_LOG_FORMAT": "json"}, "tags": {"team": "vision"},
    },
    "serverless": {"sagemaker": {"serverless": {"memory": 2048}}},
    "component": {
        "canary": {"percent": 25, "alarms": ["5xx>0"]},
        "sagemaker": {"component": {"endpoint": "shared", "gpus": 1}, "autoscaling": {"min": 0}, "instance_type": "ml.g5.xlarge"},
    },
    "joined": {"sagemaker": {"component": {"endpoint": "theirs", "manage_endpoint": False, "memory": 1024}}},
}  # fmt: skip

FUNCTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "whole": {
        "canary": {"percent": 10, "alarms": ["5xx>0", "p95>300ms"]}, "env": {"TSX_LOG_FORMAT": "json"},
        "lambda": {"url": "public", "streaming": True, "provisioned": 2, "autoscaling": {"max": 4}, "subnets": ["subnet-1a2b3c4d"],
                   "security_groups": ["sg-1a2b3c4d"], "queue": {"arn": "arn:aws:sqs:eu-central-1:123456789012:digits", "batch_size": 100}},
    },
    "managed": {"lambda": {"url": "off", "managed_instances": {"subnets": ["subnet-1a2b3c4d"], "gpu_memory": 16,
                           "operator_role": "arn:aws:iam::123456789012:role/operator"}}},
}  # fmt: skip


def spec(target: str, **more: Any) -> DeploySpec:
    if target in ("sagemaker", "lambda"):
        more[target] = {"role": ROLE, **more.get(target, {})}
    return a_spec(target, **more)


def kubernetes_files(**more: Any) -> dict[str, str]:
    return dict(emit("kubernetes", spec("kubernetes", **more), FACTS, LOCAL).files)


def pod_of(files: dict[str, str]) -> Any:
    return yaml.safe_load(files["deployment.yaml"])["spec"]["template"]["spec"]


def tool(name: str) -> str:
    return str(Path(sysconfig.get_path("scripts")) / name)


def run(*arguments: str | Path) -> None:
    finished = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr


def write_all(
    kind: str, cases: dict[str, dict[str, Any]], target: str, directory: Path, facts: Facts = FACTS
) -> dict[str, list[Path]]:
    """Write the files of each case, and return their paths by name."""
    paths: dict[str, list[Path]] = {}
    for case, more in cases.items():
        for name, text in emit(kind, spec(target, **more), facts, LOCAL).files.items():
            (directory / case).mkdir(exist_ok=True)
            (directory / case / name).write_text(text)
            paths.setdefault(name, []).append(directory / case / name)
    return paths


@pytest.mark.nightly
def test_hadolint_accepts_the_dockerfiles(tmp_path: Path) -> None:
    facts = replace(FACTS, requirements="tqdm==4.67.1\n", compiling_part="pt2 in model-config.yaml")
    cases = CONTAINERS | {"kserve": CLUSTERS["kserve"]}
    files = write_all("dockerfile", cases, "container", tmp_path, facts)["Dockerfile"]
    local = LOCAL._replace(wheel=Path("tsx_serve-0.1.0-py3-none-any.whl"))
    bound = {"device": "cpu", "torch": "2.9", "packages": {"torch_neuronx": "2.9"}}
    inf2 = spec("sagemaker", sagemaker={"instance_type": "ml.inf2.xlarge"})
    neuron = replace(facts, forms=(FormRecord("neuron", bound),))
    for name, image in (
        ("wheel", recipe(spec("container"), FACTS, local)),
        ("neuron", recipe(inf2, neuron, LOCAL)),
    ):
        files.append(tmp_path / f"Dockerfile.{name}")
        files[-1].write_text(image.files["Dockerfile"])
    run(tool("hadolint"), "--failure-threshold", "style", *files)


def test_compose_files_match_the_compose_schema(tmp_path: Path) -> None:
    files = write_all("compose", CONTAINERS, "container", tmp_path)["compose.yaml"]
    assert len(files) == len(CONTAINERS)
    run(tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", *files)


def test_manifests_support_a_cluster_of_several_teams() -> None:
    files = kubernetes_files(**CLUSTERS["guarded"])

    def content(name: str) -> Any:
        return yaml.safe_load(files[f"{name}.yaml"])["spec"]

    pod = pod_of(files)
    assert pod["securityContext"]["runAsGroup"] == pod["securityContext"]["runAsUser"]
    assert [spread["topologyKey"] for spread in pod["topologySpreadConstraints"]] == [
        "topology.kubernetes.io/zone",
        "kubernetes.io/hostname",
    ]
    assert pod["nodeSelector"] == {"disk": "ssd"}
    assert pod["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists"},
        {"key": "pool", "operator": "Equal", "value": "models", "effect": "NoSchedule"},
        {"key": "spot", "operator": "Exists"},
    ]
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {
        "memory": "4Gi",
        "ephemeral-storage": "4Gi",
        "nvidia.com/gpu": "1",
    }
    variables = {variable["name"]: variable for variable in container["env"]}
    cpus = {"resourceFieldRef": {"resource": "requests.cpu", "divisor": "1"}}
    assert variables["TSX_CPUS"]["valueFrom"] == cpus
    defaults = "shutdown_delay=5 drain_timeout=50 default_startup_timeout=600"
    assert variables["TSX_DEFAULTS"]["value"] == defaults
    token = {"secretKeyRef": {"name": "hub", "key": "token"}}
    assert variables["HF_TOKEN"]["valueFrom"] == token
    # The ports of probes are numbers, since podman kube play accepts no names.
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] == 8082
    assert [volume["emptyDir"]["sizeLimit"] for volume in pod["volumes"]] == ["4Gi", "1Gi"]
    rules = content("network-policy")["ingress"]
    namespaces = [
        [peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"] for peer in peers]
        for peers in (rule["from"] for rule in rules)
    ]
    assert namespaces == [["shop", "search"], ["monitoring"]]
    assert [rule["ports"][0]["port"] for rule in rules] == ["http", "metrics"]
    assert content("disruption")["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    # The metrics have the order in which clusters store them.
    assert [metric["type"] for metric in content("autoscaler")["metrics"]] == ["Pods", "Resource"]
    assert yaml.safe_load(files["monitor.yaml"])["metadata"]["labels"]["release"] == "prometheus"
    files = kubernetes_files(kubernetes={"queue_target": 0})
    assert [metric["type"] for metric in content("autoscaler")["metrics"]] == ["Resource"]


def test_a_gpu_slice_is_requested_with_the_vendors_toleration() -> None:
    resource = "nvidia.com/mig-1g.10gb"
    pod = pod_of(kubernetes_files(kubernetes={"gpus": 1, "gpu_resource": resource}))
    limits = pod["containers"][0]["resources"]["limits"]
    assert {name: limits[name] for name in limits if "/" in name} == {resource: "1"}
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]


@pytest.mark.parametrize(
    ("key", "value"),
    [("tolerations", "a:Never"), ("secrets", {"A": "no-key"}), ("gpu_resource", "mig-1g.10gb")],
)
def test_values_that_kubernetes_would_refuse_are_refused(key: str, value: object) -> None:
    with pytest.raises(ValidationError, match=r"write (key|SECRET/KEY)|match pattern"):
        spec("kubernetes", kubernetes={key: value})


@pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="needs kubectl, which has kustomize in it"
)
def test_kustomize_builds_the_manifests(tmp_path: Path) -> None:
    write_all("kubernetes", {"plain": CLUSTERS["plain"]}, "kubernetes", tmp_path)
    run("kubectl", "kustomize", tmp_path / "plain")


def test_an_inference_service_names_its_runtime_and_its_archive() -> None:
    files = kubernetes_files(**CLUSTERS["kserve"])
    runtime, service = (
        yaml.safe_load(files[f"{name}.yaml"]) for name in ("serving-runtime", "inference-service")
    )
    model = service["spec"]["predictor"]["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["storageUri"] == "s3://models/digits"
    assert model["env"] == [{"name": "TSX_SERVICE_ENVELOPE", "value": "kservev2"}]


@pytest.mark.nightly
def test_cfn_lint_accepts_the_templates(tmp_path: Path) -> None:
    def resources(path: Path) -> dict[str, Any]:
        content = yaml.safe_load(path.read_text())["Resources"]
        return {id: resource["Properties"] for id, resource in content.items()}

    files = write_all("cloudformation", STACKS, "sagemaker", tmp_path)["template.yaml"]
    plain, _, _, component, shared_template = files
    (tmp_path / "lambda").mkdir()
    functions = write_all("cloudformation", FUNCTIONS, "lambda", tmp_path / "lambda")
    *functions_of_cpus, function_of_gpu = functions["template.yaml"]
    lint = [tool("cfn-lint"), "--regions", "eu-central-1"]
    # E3002 is ignored, since cfn-lint does not know GPUs of functions yet.
    run(*lint, "--ignore-checks", "E3002", "--", function_of_gpu)
    run(*lint, "--", *files, *functions_of_cpus)
    function = resources(functions_of_cpus[1])
    assert function["Alias"]["ProvisionedConcurrencyConfig"] == {
        "ProvisionedConcurrentExecutions": 1
    }
    # The description contains the image, so another image makes another version.
    assert function["Version"]["Description"]["Fn::Sub"].endswith(" ${Image}")
    stack = resources(component)
    assert stack["Component"]["EndpointName"] == {"Fn::GetAtt": ["Endpoint", "EndpointName"]}
    assert stack["Component"]["RuntimeConfig"] == {"CopyCount": 1}
    assert stack["WakeAlarm"]["AlarmActions"] == [{"Ref": "WakePolicy"}]
    # The stack has no endpoint, since it uses an existing one.
    assert set(resources(shared_template)) == {"Model", "LogGroup", "Component"}
    assert set(yaml.safe_load(plain.read_text())["Parameters"]) == {"Image", "ModelDataUrl"}
    stack = resources(plain)
    assert stack["Model"]["PrimaryContainer"]["ModelDataUrl"] == {"Ref": "ModelDataUrl"}
    assert stack["Endpoint"]["EndpointConfigName"] == {
        "Fn::GetAtt": ["EndpointConfig", "EndpointConfigName"]
    }


def test_a_multi_model_endpoint_cannot_be_a_stack() -> None:
    shared = spec("sagemaker", sagemaker={"multi_model": {"endpoint": "shared"}})
    with pytest.raises(UsageError, match="the models of a multi-model endpoint are files in S3"):
        emit("cloudformation", shared, FACTS, LOCAL)


@pytest.mark.parametrize(
    ("kind", "target", "instead"),
    [
        ("compose", "container", "do not commit"),
        ("cloudformation", "sagemaker", "do not commit"),
        ("kubernetes", "kubernetes", "kubernetes.secrets"),
        ("helm", "kubernetes", "kubernetes.secrets"),
        ("kustomize", "kubernetes", "kubernetes.secrets"),
        ("dockerfile", "container", ""),
    ],
)
def test_secrets_in_files_are_reported(kind: str, target: str, instead: str) -> None:
    env = {"API_TOKEN": "value", "TSX_LOG_FORMAT": "json"}
    emitted = emit(kind, spec(target, image=f"{HOST}/tsx:1", env=env), FACTS, LOCAL)
    notes = [note for note in emitted.notes if "API_TOKEN (env)" in note and instead in note]
    assert len(notes) == any("API_TOKEN" in text for text in emitted.files.values())
    for note in emitted.notes:
        assert "value" not in note.replace("the value of", "")
        assert "TSX_LOG_FORMAT" not in note


@pytest.mark.parametrize("kind", ["kubernetes", "helm", "kustomize"])
def test_an_image_without_a_registry_gets_a_note(kind: str) -> None:
    for more, is_noted in (
        ({}, True),
        ({"repository": "registry.example.com/digits"}, False),
        ({"image": "digits:1"}, False),
    ):
        notes = emit(kind, spec("kubernetes", **more), FACTS, LOCAL).notes
        assert ("no registry" in str(notes)) is is_noted


def service(**settings: Any) -> Any:
    files = emit("compose", spec("container", container=settings), FACTS, LOCAL).files
    return yaml.safe_load(files["compose.yaml"])["services"]["digits"]


def test_a_container_reachable_from_other_machines_needs_tokens() -> None:
    defaults = "drain_timeout=25 default_startup_timeout=600"
    local = service()
    environment = {"TSX_DEFAULTS": f"{defaults} disable_token_authorization=true"}
    assert local["environment"] == environment
    assert local["ports"] == ["127.0.0.1:8080:8080", "127.0.0.1:8082:8082"]
    assert local["pids_limit"] == 4096
    assert local["logging"]["options"] == {"max-size": "20m", "max-file": "5"}
    assert (local["healthcheck"]["start_period"], local["stop_grace_period"]) == ("600s", "30s")
    # podman 4.3 does not support this key.
    assert "start_interval" not in local["healthcheck"]
    limited = service(cpus=1.5, memory="8g")
    assert (limited["cpus"], limited["mem_limit"]) == (1.5, "8g")
    environment = service(host="0.0.0.0")["environment"]
    assert environment["TSX_INFERENCE_TOKEN"].startswith("${TSX_INFERENCE_TOKEN:?")
    assert environment["TSX_DEFAULTS"] == defaults
    public_spec = spec("container", container={"host": "0.0.0.0"})
    arguments = run_arguments(public_spec, "image", name="digits", labels={})
    # Only the name is an argument, so process lists do not show the value.
    assert arguments[arguments.index("TSX_INFERENCE_TOKEN") - 1] == "--env"


class Emitting:
    """`tsx deploy --emit` with an archive; `err` is the stderr of the last call."""

    def __init__(self, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys
        make_model(directory / "digits.mar", HANDLER)
        self.wheel = make_wheel(directory / "wheels", "tsx_serve", "0.1.0")

    def __call__(self, arguments: str, code: int = 0) -> str:
        command = f"deploy digits.mar --set=build.wheel={self.wheel} --emit {arguments}"
        status = main(command.split())
        out, self.err = self.capsys.readouterr()
        assert status == code, out + self.err
        return out


@pytest.fixture
def deploy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Emitting:
    monkeypatch.chdir(tmp_path)
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ACCESS_KEY_ID"):
        monkeypatch.delenv(name, raising=False)
    return Emitting(tmp_path, capsys)


def test_files_are_complete_for_a_build_and_can_be_rewritten(deploy: Emitting) -> None:
    assert "docker compose up --build --detach --wait" in deploy("compose out")
    assert {path.name for path in Path("out").iterdir()} == {
        "Dockerfile",
        ".dockerignore",
        "compose.yaml",
        "model.mar",
        deploy.wheel.name,
        ".tsx-emitted.json",
        *LOCKS,
    }
    assert Path("out/model.mar").read_bytes() == Path("digits.mar").read_bytes()
    output = json.loads(deploy("compose out --set=container.port=9000 --json"))
    assert "out/compose.yaml" in output["files"]
    assert "127.0.0.1:9000:8080" in Path("out/compose.yaml").read_text()


def test_a_link_in_place_of_a_file_is_replaced(deploy: Emitting) -> None:
    Path("out").mkdir()
    for name in ("Dockerfile", "model.mar", ".tsx-emitted.json"):
        Path("out", name).symlink_to(Path("elsewhere").absolute())
    deploy("compose out")
    assert not Path("elsewhere").exists()
    assert Path("out/model.mar").read_bytes() == Path("digits.mar").read_bytes()


def test_the_default_directory_is_named_after_the_kind(deploy: Emitting) -> None:
    assert "wrote compose/compose.yaml" in deploy("compose")
    assert "wrote dockerfile/Dockerfile" in deploy("dockerfile --set=container.port=9000")
    assert Path("compose/Dockerfile").is_file()
    deploy(f"sagemaker --role {ROLE} --image {HOST}/d@sha256:{64 * 'a'}")
    template = yaml.safe_load(Path("sagemaker/template.yaml").read_text())
    types = {resource["Type"] for resource in template["Resources"].values()}
    assert "AWS::SageMaker::Endpoint" in types


def test_foreign_and_changed_files_are_not_overwritten(deploy: Emitting) -> None:
    Path("out").mkdir()
    Path("out/Dockerfile").write_text("FROM scratch\n")
    deploy("dockerfile out", code=1)
    assert "out/Dockerfile would be overwritten" in deploy.err
    assert [path.name for path in Path("out").iterdir()] == ["Dockerfile"]
    deploy("dockerfile other")
    with Path("other/.dockerignore").open("a") as file:
        file.write("!more\n")
    deploy("dockerfile other --set=build.packages=['gcc']", code=2)
    deploy("dockerfile other --set=build.base=python:3.12", code=1)
    assert ".dockerignore would be overwritten" in deploy.err


def test_requirements_of_the_archive_are_installed_in_the_image(deploy: Emitting) -> None:
    path = make_model(Path("digits.mar"), HANDLER, requirementsFile="needs.txt")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("needs.txt", "tqdm==4.67.1\n")
    deploy("dockerfile out --target sagemaker")
    assert Path("out/requirements.txt").read_text() == "tqdm==4.67.1\n"
    dockerfile = Path("out/Dockerfile").read_text().replace(" \\\n    ", " ")
    (line,) = [
        line for line in dockerfile.splitlines() if "--requirement /tmp/requirements.txt" in line
    ]
    # torchvision must come from the same index as torch.
    assert '--extra-index-url "$TORCH_INDEX_URL"' in line
    assert "--constraint /opt/tsx/constraints.txt" in line


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("terraform out", "there is no 'terraform'"),
        ("compose out --target docker", "there is no 'docker'"),
        ("compose out --target sagemaker", "is for --target container, not sagemaker"),
        ("cloudformation out", "sagemaker.role is not given"),
        ("kubernetes out --set=kubernetes.kserve=true", "kubernetes.storage is not given"),
        ("compose out --set=build.wheel=absent.whl", "absent.whl is not a wheel"),
        ("compose out --set=container.memory=much", "container.memory: String should match"),
    ],
)
def test_invalid_options_are_reported_and_nothing_is_written(
    deploy: Emitting, arguments: str, error: str
) -> None:
    deploy(arguments, code=1 if "absent" in error else 2)
    assert error in deploy.err
    assert not Path("out").exists()


def test_emitting_does_not_import_boto3(tmp_path: Path) -> None:
    code = "import sys, tsx_cli.deploy.emit.render; sys.exit('boto3' in sys.modules or 'botocore' in sys.modules)"
    run(sys.executable, "-c", code)


def test_a_specified_number_of_cpus_replaces_the_requested_one() -> None:
    (container,) = pod_of(kubernetes_files(env={"TSX_CPUS": "3"}))["containers"]
    assert {"name": "TSX_CPUS", "value": "3"} in container["env"]
    assert [variable["name"] for variable in container["env"]].count("TSX_CPUS") == 1


def test_missing_settings_are_reported_before_anything_is_built(
    deploy: Emitting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*_: object) -> None:
        raise AssertionError("an image is not needed here")

    monkeypatch.setattr(local, "pinned_base", build)
    for kind, targets in (
        ("cloudformation", "sagemaker, lambda"),
        ("github", "sagemaker, lambda, kubernetes"),
    ):
        deploy(f"{kind} --region eu-west-1", code=2)
        lines = deploy.err.splitlines()
        assert lines[:2] == [
            f"the target is sagemaker, of {targets}; --target names another",
            "reading digits.mar",
        ]
        assert lines[2].startswith("Error: sagemaker.role is not given")
    out = deploy(f"cloudformation --region eu-west-1 --role {ROLE} --json")
    assert (json.loads(out)["files"], deploy.err) == (["cloudformation/template.yaml"], "")
    deploy("helm --name 1digits", code=2)
    assert "begins with a digit" in deploy.err
