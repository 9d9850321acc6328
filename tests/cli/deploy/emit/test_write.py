"""`--emit`: files for whatever is wanted, as the tools that read them want them, and nothing of
anybody else's overwritten.
"""

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
from tsx_cli.deploy.container.resources import run_words
from tsx_cli.deploy.emit.render import emit
from tsx_cli.deploy.engine.facts import Facts
from tsx_cli.deploy.image import local
from tsx_cli.deploy.image.recipe import recipe
from tsx_cli.deploy.spec import DeploySpec
from tsx_cli.main import main

pytestmark = pytest.mark.slow


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


def tool(name: str) -> str:
    return str(Path(sysconfig.get_path("scripts")) / name)


def run(*words: str | Path) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def written(
    kind: str, matrix: dict[str, dict[str, Any]], target: str, directory: Path, facts: Facts = FACTS
) -> dict[str, list[Path]]:
    """The files of each case, by their names."""
    found: dict[str, list[Path]] = {}
    for case, more in matrix.items():
        for name, text in emit(kind, spec(target, **more), facts, LOCAL).files.items():
            (directory / case).mkdir(exist_ok=True)
            (directory / case / name).write_text(text)
            found.setdefault(name, []).append(directory / case / name)
    return found


@pytest.mark.usefixtures("processes")
def test_hadolint_has_nothing_against_the_dockerfiles(tmp_path: Path) -> None:
    facts = replace(FACTS, requirements="tqdm==4.67.1\n", compiles="pt2 in model-config.yaml")
    files = written(
        "dockerfile", CONTAINERS | {"kserve": CLUSTERS["kserve"]}, "container", tmp_path, facts
    )["Dockerfile"]
    wheel = tmp_path / "Dockerfile.wheel"
    wheel.write_text(
        recipe(
            spec("container"), FACTS, LOCAL._replace(wheel=Path("tsx_serve-0.1.0-py3-none-any.whl"))
        ).files["Dockerfile"]
    )
    neuron = tmp_path / "Dockerfile.neuron"
    form = FormRecord(
        "neuron", {"device": "cpu", "torch": "2.9", "packages": {"torch_neuronx": "2.9"}}
    )
    inf2 = spec("sagemaker", sagemaker={"instance_type": "ml.inf2.xlarge"})
    neuron.write_text(recipe(inf2, replace(facts, forms=(form,)), LOCAL).files["Dockerfile"])
    run(tool("hadolint"), "--failure-threshold", "style", *files, wheel, neuron)


@pytest.mark.usefixtures("processes")
def test_compose_files_are_what_the_specification_says(tmp_path: Path) -> None:
    files = written("compose", CONTAINERS, "container", tmp_path)["compose.yaml"]
    assert len(files) == len(CONTAINERS)
    run(tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", *files)


def test_manifests_hold_what_a_cluster_of_several_teams_asks_for() -> None:
    files = emit("kubernetes", spec("kubernetes", **CLUSTERS["guarded"]), FACTS, LOCAL).files
    made = {
        name: yaml.safe_load(text)["spec"]
        for name, text in files.items()
        if name.endswith(".yaml") and name != "kustomization.yaml"
    }
    pod = made["deployment.yaml"]["template"]["spec"]
    assert pod["securityContext"]["runAsGroup"] == pod["securityContext"]["runAsUser"]
    assert [each["topologyKey"] for each in pod["topologySpreadConstraints"]] == [
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
    sources = {each["name"]: each["valueFrom"] for each in container["env"] if "valueFrom" in each}
    assert sources["TSX_CPUS"] == {"resourceFieldRef": {"resource": "requests.cpu", "divisor": "1"}}
    (defaults,) = [each["value"] for each in container["env"] if each["name"] == "TSX_DEFAULTS"]
    assert defaults == "shutdown_delay=5 drain_timeout=50 default_startup_timeout=600"
    ports = [
        container[name]["httpGet"]["port"]
        for name in ("startupProbe", "readinessProbe", "livenessProbe")
    ]
    assert ports == [8082] * 3  # podman kube play takes no name of a port in a probe
    assert sources["HF_TOKEN"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
    assert [volume["emptyDir"]["sizeLimit"] for volume in pod["volumes"]] == ["4Gi", "1Gi"]
    rules = [
        (
            [
                peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
                for peer in rule["from"]
            ],
            rule["ports"][0]["port"],
        )
        for rule in made["network-policy.yaml"]["ingress"]
    ]
    assert rules == [(["shop", "search"], "http"), (["monitoring"], "metrics")]
    assert made["disruption.yaml"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    assert [metric["type"] for metric in made["autoscaler.yaml"]["metrics"]] == [
        "Pods",
        "Resource",
    ]  # as clusters store it
    assert yaml.safe_load(files["monitor.yaml"])["metadata"]["labels"]["release"] == "prometheus"
    alone = emit(
        "kubernetes", spec("kubernetes", kubernetes={"queue_target": 0}), FACTS, LOCAL
    ).files
    assert [
        metric["type"] for metric in yaml.safe_load(alone["autoscaler.yaml"])["spec"]["metrics"]
    ] == ["Resource"]


def test_a_share_of_a_gpu_is_asked_for_by_its_resource_on_nodes_with_the_vendors_taint() -> None:
    asked = spec("kubernetes", kubernetes={"gpus": 1, "gpu_resource": "nvidia.com/mig-1g.10gb"})
    pod = yaml.safe_load(emit("kubernetes", asked, FACTS, LOCAL).files["deployment.yaml"])["spec"][
        "template"
    ]["spec"]
    limits = pod["containers"][0]["resources"]["limits"]
    assert {name: limits[name] for name in limits if "/" in name} == {"nvidia.com/mig-1g.10gb": "1"}
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]


@pytest.mark.parametrize(
    ("key", "value"),
    [("tolerations", "a:Never"), ("secrets", {"A": "no-key"}), ("gpu_resource", "mig-1g.10gb")],
)
def test_what_kubernetes_would_refuse_is_refused_before(key: str, value: object) -> None:
    with pytest.raises(ValidationError, match=r"write (key|SECRET/KEY)|match pattern"):
        spec("kubernetes", kubernetes={key: value})


@pytest.mark.usefixtures("processes")
@pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="needs kubectl, which has kustomize in it"
)
def test_kustomize_builds_what_is_there(tmp_path: Path) -> None:
    written("kubernetes", {"plain": CLUSTERS["plain"]}, "kubernetes", tmp_path)
    run("kubectl", "kustomize", tmp_path / "plain")


def test_an_inference_service_names_its_runtime_and_its_archive() -> None:
    files = emit("kubernetes", spec("kubernetes", **CLUSTERS["kserve"]), FACTS, LOCAL).files
    runtime, service = (
        yaml.safe_load(files[f"{name}.yaml"]) for name in ("serving-runtime", "inference-service")
    )
    model = service["spec"]["predictor"]["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["storageUri"] == "s3://models/digits"
    assert model["env"] == [{"name": "TSX_SERVICE_ENVELOPE", "value": "kservev2"}]


@pytest.mark.usefixtures("processes")
def test_cloudformation_has_nothing_against_the_templates(tmp_path: Path) -> None:
    files = written("cloudformation", STACKS, "sagemaker", tmp_path)["template.yaml"]
    (tmp_path / "lambda").mkdir()
    functions = written("cloudformation", FUNCTIONS, "lambda", tmp_path / "lambda")["template.yaml"]
    # It does not know yet that a function can have a GPU.
    run(
        tool("cfn-lint"),
        "--regions",
        "eu-central-1",
        "--ignore-checks",
        "E3002",
        "--",
        functions.pop(),
    )
    run(tool("cfn-lint"), "--regions", "eu-central-1", "--", *files, *functions)
    whole = yaml.safe_load(functions[1].read_text())["Resources"]
    assert whole["Alias"]["Properties"]["ProvisionedConcurrencyConfig"] == {
        "ProvisionedConcurrentExecutions": 1
    }
    assert whole["Version"]["Properties"]["Description"]["Fn::Sub"].endswith(
        " ${Image}"
    )  # another image is another version
    component = yaml.safe_load((tmp_path / "component" / "template.yaml").read_text())["Resources"]
    assert component["Component"]["Properties"]["EndpointName"] == {
        "Fn::GetAtt": ["Endpoint", "EndpointName"]
    }
    assert component["Component"]["Properties"]["RuntimeConfig"] == {"CopyCount": 1}
    assert component["WakeAlarm"]["Properties"]["AlarmActions"] == [{"Ref": "WakePolicy"}]
    joined = yaml.safe_load((tmp_path / "joined" / "template.yaml").read_text())["Resources"]
    assert set(joined) == {"Model", "LogGroup", "Component"}  # the endpoint is somebody else's
    with pytest.raises(UsageError, match="the models of a multi-model endpoint are files in S3"):
        emit(
            "cloudformation",
            spec("sagemaker", sagemaker={"multi_model": {"endpoint": "shared"}}),
            FACTS,
            LOCAL,
        )
    plain = yaml.safe_load(files[0].read_text())
    assert set(plain["Parameters"]) == {"Image", "ModelDataUrl"}
    assert plain["Resources"]["Model"]["Properties"]["PrimaryContainer"]["ModelDataUrl"] == {
        "Ref": "ModelDataUrl"
    }
    assert plain["Resources"]["Endpoint"]["Properties"]["EndpointConfigName"] == {
        "Fn::GetAtt": ["EndpointConfig", "EndpointConfigName"]
    }


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
def test_a_secret_that_gets_into_files_is_named(kind: str, target: str, instead: str) -> None:
    env = {"API_TOKEN": "value", "TSX_LOG_FORMAT": "json"}
    made = emit(kind, spec(target, image=f"{HOST}/tsx:1", env=env), FACTS, LOCAL)
    found = [note for note in made.notes if "API_TOKEN (env)" in note and instead in note]
    assert len(found) == any("API_TOKEN" in text for text in made.files.values())
    assert not any(
        "value" in note.replace("the value of", "") or "TSX_LOG_FORMAT" in note
        for note in made.notes
    )


@pytest.mark.parametrize("kind", ["kubernetes", "helm", "kustomize"])
def test_an_image_without_a_registry_is_pointed_out(kind: str) -> None:
    cases: list[tuple[dict[str, Any], bool]] = [
        ({}, True),
        ({"repository": "registry.example.com/digits"}, False),
        ({"image": "digits:1"}, False),
    ]
    for more, warned in cases:
        notes = emit(kind, spec("kubernetes", **more), FACTS, LOCAL).notes
        assert any("no registry" in note for note in notes) is warned


def service(**own: Any) -> Any:
    files = emit("compose", spec("container", container=own), FACTS, LOCAL).files
    return yaml.safe_load(files["compose.yaml"])["services"]["digits"]


def test_a_container_that_others_reach_asks_for_tokens() -> None:
    own = service()
    assert own["environment"] == {
        "TSX_DEFAULTS": "drain_timeout=25 default_startup_timeout=600 disable_token_authorization=true"
    }
    assert own["ports"] == ["127.0.0.1:8080:8080", "127.0.0.1:8082:8082"]
    assert (own["pids_limit"], own["logging"]["options"]) == (
        4096,
        {"max-size": "20m", "max-file": "5"},
    )
    assert (own["healthcheck"]["start_period"], own["stop_grace_period"]) == ("600s", "30s")
    assert "start_interval" not in own["healthcheck"]  # podman 4.3 has none
    limited = service(cpus=1.5, memory="8g")
    assert (limited["cpus"], limited["mem_limit"]) == (1.5, "8g")
    environment = service(host="0.0.0.0")["environment"]
    assert environment["TSX_INFERENCE_TOKEN"].startswith("${TSX_INFERENCE_TOKEN:?")
    assert environment["TSX_DEFAULTS"] == "drain_timeout=25 default_startup_timeout=600"
    words = run_words(
        spec("container", container={"host": "0.0.0.0"}), "image", name="digits", labels={}
    )
    assert (
        words[words.index("TSX_INFERENCE_TOKEN") - 1] == "--env"
    )  # its value is in no list of processes


class Deploy:
    def __init__(self, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys
        make_model(directory / "digits.mar", HANDLER)
        self.wheel = make_wheel(directory / "wheels", "tsx_serve", "0.1.0")

    def __call__(self, *words: str, code: int = 0) -> str:
        said = ["deploy", "digits.mar", f"--set=build.wheel={self.wheel}", *words]
        assert main(said) == code, self.capsys.readouterr()
        out, self.err = self.capsys.readouterr()
        return out


@pytest.fixture
def deploy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Deploy:
    monkeypatch.chdir(tmp_path)
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ACCESS_KEY_ID"):
        monkeypatch.delenv(name, raising=False)
    return Deploy(tmp_path, capsys)


def test_files_are_written_with_all_that_a_build_needs_and_may_be_written_again(
    deploy: Deploy, tmp_path: Path
) -> None:
    out = deploy("--emit", "compose", "out")
    assert "docker compose up --build --detach --wait" in out
    there = {path.name for path in (tmp_path / "out").iterdir()}
    assert there == {
        "Dockerfile",
        ".dockerignore",
        "compose.yaml",
        "model.mar",
        deploy.wheel.name,
        ".tsx-emitted.json",
        *LOCKS,
    }
    assert (tmp_path / "out" / "model.mar").read_bytes() == (tmp_path / "digits.mar").read_bytes()
    reported = json.loads(deploy("--emit", "compose", "out", "--set=container.port=9000", "--json"))
    assert "out/compose.yaml" in reported["files"]
    assert "127.0.0.1:9000:8080" in (tmp_path / "out" / "compose.yaml").read_text()


def test_a_link_in_the_place_of_a_file_is_replaced_and_not_followed(
    deploy: Deploy, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    for name in ("Dockerfile", "model.mar", ".tsx-emitted.json"):
        (tmp_path / "out" / name).symlink_to(tmp_path / "elsewhere")
    deploy("--emit", "compose", "out")
    assert not (tmp_path / "elsewhere").exists()
    assert (tmp_path / "out" / "model.mar").read_bytes() == (tmp_path / "digits.mar").read_bytes()


def test_without_a_directory_the_files_go_into_one_of_the_kinds_name(
    deploy: Deploy, tmp_path: Path
) -> None:
    assert "wrote compose/compose.yaml" in deploy("--emit", "compose")
    assert "wrote dockerfile/Dockerfile" in deploy(
        "--emit", "dockerfile", "--set=container.port=9000"
    )
    assert (tmp_path / "compose" / "Dockerfile").is_file()
    deploy(
        "--emit",
        "sagemaker",
        "--role",
        "arn:aws:iam::123456789012:role/r",
        "--image",
        f"1.dkr.ecr.eu-west-1.amazonaws.com/d@sha256:{64 * 'a'}",
    )
    template = yaml.safe_load((tmp_path / "sagemaker" / "template.yaml").read_text())
    assert "AWS::SageMaker::Endpoint" in {each["Type"] for each in template["Resources"].values()}


def test_a_file_that_somebody_else_wrote_or_changed_is_left_alone(
    deploy: Deploy, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "Dockerfile").write_text("FROM scratch\n")
    deploy("--emit", "dockerfile", "out", code=1)
    assert "out/Dockerfile would be overwritten" in deploy.err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["Dockerfile"]
    deploy("--emit", "dockerfile", "other")
    with (tmp_path / "other" / ".dockerignore").open("a") as file:
        file.write("!more\n")
    deploy("--emit", "dockerfile", "other", "--set=build.packages=['gcc']", code=2)
    deploy("--emit", "dockerfile", "other", "--set=build.base=python:3.12", code=1)
    assert ".dockerignore would be overwritten" in deploy.err


def test_requirements_of_the_archive_are_installed_in_the_image(
    deploy: Deploy, tmp_path: Path
) -> None:
    path = make_model(tmp_path / "digits.mar", HANDLER, requirementsFile="needs.txt")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("needs.txt", "tqdm==4.67.1\n")
    deploy("--emit", "dockerfile", "out", "--target", "sagemaker")
    assert (tmp_path / "out" / "requirements.txt").read_text() == "tqdm==4.67.1\n"
    dockerfile = (tmp_path / "out" / "Dockerfile").read_text().replace(" \\\n    ", " ")
    (installed,) = [
        line for line in dockerfile.splitlines() if "--requirement /tmp/requirements.txt" in line
    ]
    assert (
        '--extra-index-url "$TORCH_INDEX_URL"' in installed
    )  # torchvision of another index does not fit torch of this one
    assert "--constraint /opt/tsx/constraints.txt" in installed


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--emit", "terraform", "out"], "there is no 'terraform'"),
        (["--emit", "compose", "out", "--target", "docker"], "there is no 'docker'"),
        (["--emit", "compose", "out", "--target", "sagemaker"], "is for --target container, not sagemaker"),
        (["--emit", "cloudformation", "out"], "sagemaker.role is not given"),
        (["--emit", "kubernetes", "out", "--set=kubernetes.kserve=true"], "kubernetes.storage is not given"),
        (["--emit", "compose", "out", "--set=build.wheel=absent.whl"], "absent.whl is not a wheel"),
        (["--emit", "compose", "out", "--set=container.memory=much"], "container.memory: String should match"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_reported_and_nothing_is_written(
    deploy: Deploy, tmp_path: Path, words: list[str], said: str
) -> None:
    deploy(*words, code=1 if "absent" in said else 2)
    assert said in deploy.err
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("processes")
def test_emitting_imports_nothing_of_aws(tmp_path: Path) -> None:
    code = "import sys, tsx_cli.deploy.emit.render; sys.exit('boto3' in sys.modules or 'botocore' in sys.modules)"
    run(sys.executable, "-c", code)


def test_cpus_that_are_given_take_the_place_of_the_requested_ones() -> None:
    files = emit("kubernetes", spec("kubernetes", env={"TSX_CPUS": "3"}), FACTS, LOCAL).files
    (container,) = yaml.safe_load(files["deployment.yaml"])["spec"]["template"]["spec"][
        "containers"
    ]
    assert [each for each in container["env"] if each["name"] == "TSX_CPUS"] == [
        {"name": "TSX_CPUS", "value": "3"}
    ]


def test_the_target_and_what_is_missing_are_told_before_anything_is_built(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*_: object) -> None:
        raise AssertionError("an image is not needed here")

    monkeypatch.setattr(local, "pinned_base", build)
    monkeypatch.chdir(tmp_path)
    words = [
        "deploy",
        str(make_model(Path("digits.mar"), HANDLER)),
        "--region",
        "eu-west-1",
        "--emit",
    ]
    for kind, targets in (
        ("cloudformation", "sagemaker, lambda"),
        ("github", "sagemaker, lambda, kubernetes"),
    ):
        assert main([*words, kind]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert lines[:2] == [
            f"the target is sagemaker, of {targets}; --target names another",
            "reading digits.mar",
        ]
        assert lines[2].startswith("Error: sagemaker.role is not given")
    assert main([*words, "cloudformation", "--role", ROLE, "--json"]) == 0
    written = capsys.readouterr()
    assert (json.loads(written.out)["files"], written.err) == (["cloudformation/template.yaml"], "")
    assert main([*words, "helm", "--name", "1digits"]) == 2
    assert "begins with a digit" in capsys.readouterr().err
