"""Real containers with podman, deployed by tsx, `podman kube play` and podman-compose.

`pytest -m image` runs it.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest
import yaml

from tests.support.containers import run
from tests.support.models import make_model
from tests.support.servers import DEADLINE
from tsx_archiver import write_archive
from tsx_cli.archive.python_files.spec import python_file_spec

COMPOSE = Path(sys.executable).parent / "podman-compose"
MISSING = [name for name in ("podman", "debootstrap") if shutil.which(name) is None]
HANDLER = """
import time

def handle(data, context):
    if data is None:
        {load}
    time.sleep(float(data[0]["body"]))
    return ["{version}"] * len(data)
"""
PYTHON_FILE = """
import time

def predict(seconds: float) -> str:
    time.sleep(seconds)
    return "1.0"
"""
LOADS, FAILS = "return None", "raise RuntimeError('no weights')"
SIZES = ("import json; from tsx_runtime.shared.cores import cpu_count; from tsx_runtime.shared.memory import container_memory; "
         "print(json.dumps([cpu_count(), container_memory()]))")  # fmt: skip
CAPABILITIES = (
    "print(*[line for line in open('/proc/1/status') if line.startswith(('CapEff', 'NoNewPrivs'))])"
)
WRITE = "import os; open('/tmp/a', 'w'); open('/dev/shm/a', 'w'); print(os.access('/', os.W_OK), os.getuid())"

pytestmark = [
    pytest.mark.image,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}, which apt installs"),
    pytest.mark.skipif(
        not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root, for debootstrap"
    ),
]


class Deployment:
    """`tsx deploy` with the arguments that all calls share."""

    def __init__(self, directory: Path, base: str, ports: list[int]) -> None:
        self.directory, self.ports = directory, ports
        # One version is a Python file, and the others are TorchServe handlers.
        (directory / "sleeper.py").write_text(PYTHON_FILE)
        with python_file_spec(directory / "sleeper.py") as (spec, _):
            write_archive(spec, directory).rename(directory / "1.0.mar")
        for version, load in (("2.0", FAILS), ("3.0", LOADS)):
            handler = HANDLER.format(load=load, version=version)
            make_model(
                directory / f"{version}.mar",
                handler,
                name="sleeper",
                version=version,
                config="batchSize: 1\n" + ("monitor: {share: 100%}\n" if version == "3.0" else ""),
            )
        build = {
            "build.tool": "podman",
            "build.base": base,
            "build.torch_index": "",
            "container.engine": "podman",
        }
        container = {"container.port": ports[0], "container.metrics_port": ports[1], "container.memory": "2g", "container.cpus": "1",
               "container.startup_timeout": "5m", "container.grace": "20s"}  # fmt: skip
        self.settings = [
            argument
            for key, value in (build | container).items()
            for argument in (f"--set={key}={value}",)
        ]
        self.environment = {**os.environ, "XDG_CACHE_HOME": str(directory / "cache")}

    def __call__(self, *arguments: str, code: int = 0) -> str:
        command = [sys.executable, "-m", "tsx_cli", "deploy", *arguments]
        return run(*command, environment=self.environment, code=code, cwd=self.directory)

    def apply(self, version: str, code: int = 0) -> str:
        target = ("--name", "sleeper", "--target", "container", "--no-check", "--yes")
        return self(f"{version}.mar", *target, *self.settings, code=code)

    def verb(self, verb: str, *arguments: str) -> str:
        return self(
            verb,
            *arguments,
            "--name",
            "sleeper",
            "--target",
            "container",
            "--set=container.engine=podman",
        )

    def status(self) -> dict[str, Any]:
        return dict(json.loads(self.verb("status", "--json")))

    def inside(self, script: str) -> str:
        return run("podman", "exec", self.status()["container"], "python", "-c", script)


@pytest.fixture(scope="module")
def deployment(
    containers: Path,
    base: str,
    tmp_path_factory: pytest.TempPathFactory,
    free_ports: Callable[[int], list[int]],
) -> Iterator[Deployment]:
    deployment = Deployment(tmp_path_factory.mktemp("deployment"), base, free_ports(2))
    print(f"\n{deployment.apply('1.0')}")
    yield deployment
    deployment.verb("destroy", "--purge", "--yes")
    assert run("podman", "ps", "--all", "--quiet") == ""


def predict(port: int, seconds: float, token: str = "") -> tuple[int, str]:
    headers = {"Content-Type": "text/plain"} | (
        {"Authorization": f"Bearer {token}"} if token else {}
    )
    request = Request(
        f"http://127.0.0.1:{port}/predictions/sleeper", data=str(seconds).encode(), headers=headers
    )
    try:
        with urlopen(request, timeout=DEADLINE) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


def metrics_of(deployment: Deployment) -> str:
    with urlopen(f"http://127.0.0.1:{deployment.ports[1]}/metrics", timeout=DEADLINE) as answer:
        return str(answer.read().decode())


def wait_until(condition: Callable[[], bool], message: str) -> None:
    deadline = time.monotonic() + DEADLINE * 2
    while not condition():
        assert time.monotonic() < deadline, message
        time.sleep(0.2)  # polling is needed, since containers announce nothing


def answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=DEADLINE) as answer:
            return bool(answer.status == 200)
    except (URLError, ConnectionError):
        return False


def test_a_deployed_container_answers_within_its_limits(deployment: Deployment) -> None:
    status = deployment.status()
    assert (status["status"], status["model"], status["with"]) == (
        "healthy",
        "sleeper/1.0",
        "podman",
    )
    (deployment.directory / "0.txt").write_text("0")
    assert deployment.verb("invoke", "0.txt").strip() == "1.0"
    assert "serving sleeper/1.0 at" in deployment.verb("logs", "--lines=50")
    assert json.loads(deployment.inside(SIZES)) == [1, 2 << 30]
    assert deployment.inside(WRITE).split() == ["False", "10001"]
    assert re.findall(r"\w+$", deployment.inside(CAPABILITIES), re.MULTILINE) == ["0" * 16, "1"]
    assert deployment.apply("1.0").count("create") == 0


def test_a_failing_version_is_replaced_and_a_working_one_rolled_back(
    deployment: Deployment,
) -> None:
    first_container = deployment.status()["container"]
    output = deployment.apply("2.0", code=1)
    print(output)
    assert "RuntimeError: no weights" in output
    assert "ended with 0" not in output
    assert f"{first_container}, which ran before, was started again" in output
    wait_until(
        lambda: deployment.status()["status"] == "healthy",
        "the previous version is not healthy again",
    )
    assert (deployment.status()["container"], predict(deployment.ports[0], 0)) == (
        first_container,
        (200, "1.0"),
    )
    deployment.apply("3.0")
    assert predict(deployment.ports[0], 0) == (200, "3.0")
    samples = re.compile(r"^tsx_monitor_samples_total\{.*\} 1", re.MULTILINE)
    wait_until(lambda: samples.search(metrics_of(deployment)) is not None, "no sample is examined")
    deployment.verb("rollback", "--yes")
    assert (deployment.status()["container"], predict(deployment.ports[0], 0)) == (
        first_container,
        (200, "1.0"),
    )


def test_sigterm_loses_no_accepted_request(deployment: Deployment) -> None:
    name, port = deployment.status()["container"], deployment.ports[0]

    def waiting() -> bool:
        pattern = r"^tsx_requests_waiting\{.*\} [345]"
        return re.search(pattern, metrics_of(deployment), re.MULTILINE) is not None

    with ThreadPoolExecutor(6) as pool:
        results = [pool.submit(predict, port, 1) for _ in range(6)]
        wait_until(waiting, "no request waits")
        run("podman", "stop", name)
        assert [result.result() for result in results] == [(200, "1.0")] * 6
    assert deployment.status()["reason"] == "it ended with 0"
    deployment.apply("1.0")
    assert predict(port, 0) == (200, "1.0")


def test_a_hanging_server_is_unhealthy_and_restarted(deployment: Deployment) -> None:
    deployment.inside(
        "import os; os.kill(int(open('/proc/1/task/1/children').read().split()[0]), 19)"
    )
    assert deployment.status()["status"] == "unhealthy"
    deployment.apply("1.0")
    assert (deployment.status()["status"], predict(deployment.ports[0], 0)) == (
        "healthy",
        (200, "1.0"),
    )


def test_a_failing_engine_is_reported_as_the_cause(
    deployment: Deployment, containers: Path, tmp_path: Path
) -> None:
    settings, environment = (containers / "containers.conf").read_text(), deployment.environment
    (tmp_path / "containers.conf").write_text(
        settings.replace("[containers]", '[containers]\ninit_path = "/nowhere/init"')
    )
    deployment.environment = environment | {"CONTAINERS_CONF": str(tmp_path / "containers.conf")}
    deployment.verb("destroy", "--yes")
    output = deployment.apply("1.0", code=1)
    deployment.environment = environment
    print(output)
    assert "Likely: Podman itself failed, before anything of the image was started." in output
    assert "The image does not start tsx" not in output
    deployment.apply("1.0")


@pytest.fixture
def image(deployment: Deployment) -> Iterator[str]:
    """Yield the image of the deployment, and stop its container, which uses the ports."""
    status = deployment.status()
    run("podman", "stop", status["container"])
    yield str(status["image"])
    deployment.apply("1.0")


def test_kube_play_runs_the_emitted_deployment(
    deployment: Deployment, image: str, tmp_path: Path
) -> None:
    emitted = tmp_path / "kubernetes"
    settings = (
        "--set=kubernetes.cpu=500m",
        "--set=kubernetes.memory=2Gi",
        "--set=kubernetes.replicas=1",
    )
    deployment(
        "1.0.mar",
        "--name",
        "sleeper",
        "--emit",
        "kubernetes",
        str(emitted),
        "--image",
        image,
        *settings,
    )
    manifest = yaml.safe_load((emitted / "deployment.yaml").read_text())
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    for port, host_port in zip(container["ports"], deployment.ports, strict=True):
        port |= {
            "hostPort": host_port,
            "hostIP": "127.0.0.1",
        }  # needed, since podman has no Service
    tokens = {"inference": "a" * 32, "management": "b" * 32}
    encoded = {name: base64.b64encode(token.encode()).decode() for name, token in tokens.items()}
    documents = [manifest]
    # Older versions of podman do not support Secrets.
    if podman_version() < (4, 4):
        (tmp_path / "secret.json").write_text(json.dumps(encoded))
        run("podman", "secret", "create", "sleeper-tokens", tmp_path / "secret.json")
    else:
        documents.insert(
            0,
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": "sleeper-tokens"},
                "data": encoded,
            },
        )
    file = tmp_path / "play.yaml"
    file.write_text(yaml.safe_dump_all(documents, sort_keys=False))
    print(run("podman", "kube", "play", file))
    port, metrics = deployment.ports
    try:
        pod = run("podman", "ps", "--quiet", "--filter", f"ancestor={image}").strip()
        wait_until(lambda: answers(f"http://127.0.0.1:{metrics}/readyz"), "the pod is not ready")
        wait_until(lambda: is_healthy(pod), "the liveness probe fails")
        assert predict(port, 0)[0] == 400  # TorchServe's status for a request without a token
        assert predict(port, 0, tokens["inference"]) == (200, "1.0")
        output = run(
            "podman",
            "exec",
            pod,
            "python",
            "-c",
            f"import os; print(os.environ['TSX_CPUS']); {SIZES}",
        ).split("\n")
        assert (output[0], json.loads(output[1])[1]) == ("1", 2 << 30)
        write = WRITE.replace("open('/dev/shm/a', 'w'); ", "")  # podman 4.3 ignores fsGroup
        assert run("podman", "exec", pod, "python", "-c", write).split() == ["False", "10001"]
        capabilities = run("podman", "exec", pod, "python", "-c", CAPABILITIES)
        assert re.findall(r"\w+$", capabilities, re.MULTILINE) == ["0" * 16, "1"]
    finally:
        run("podman", "kube", "down", file)
        subprocess.run(
            ["podman", "secret", "rm", "sleeper-tokens"], capture_output=True, check=False
        )


@pytest.mark.skipif(not COMPOSE.exists(), reason="needs podman-compose, which pip installs")
def test_compose_builds_and_runs_the_emitted_file(
    deployment: Deployment, image: str, tmp_path: Path
) -> None:
    emitted = tmp_path / "compose"
    deployment(
        "1.0.mar", "--name", "sleeper", "--emit", "compose", str(emitted), *deployment.settings
    )
    # The image of the deployment is reused.
    up_arguments = ("--podman-build-args=--format docker", "up", "--build", "--detach")
    print(run(COMPOSE, *up_arguments, cwd=emitted))
    port, metrics = deployment.ports
    try:
        service = run(
            "podman", "ps", "--quiet", "--filter", "label=com.docker.compose.service=sleeper"
        ).strip()
        wait_until(
            lambda: answers(f"http://127.0.0.1:{metrics}/readyz"), "the service is not ready"
        )
        assert is_healthy(service)
        assert predict(port, 0) == (200, "1.0")
        assert json.loads(run("podman", "exec", service, "python", "-c", SIZES)) == [1, 2 << 30]
        assert run("podman", "exec", service, "python", "-c", WRITE).split() == ["False", "10001"]
        capabilities = run("podman", "exec", service, "python", "-c", CAPABILITIES)
        assert re.findall(r"\w+$", capabilities, re.MULTILINE) == ["0" * 16, "1"]
    finally:
        run(COMPOSE, "down", cwd=emitted)


def podman_version() -> tuple[int, int]:
    major, minor = run("podman", "version", "--format", "{{.Client.Version}}").split(".")[:2]
    return int(major), int(minor)


def is_healthy(container: str) -> bool:
    return (
        subprocess.run(
            ["podman", "healthcheck", "run", container], capture_output=True, check=False
        ).returncode
        == 0
    )
