"""`tsx deploy --target container` with a double of docker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.deploying import HANDLER, Deploy, actions
from tests.support.models import make_model
from tests.support.platforms.docker import Engine
from tests.support.wheels import make_wheel
from tsx_cli.deploy.container import kinds as container_kinds
from tsx_cli.deploy.container.deployment import _parse_time
from tsx_cli.deploy.container.resources import engine_arguments

LOCKS = ["locked-base.txt", "locked-lambda.txt", "locked-sbom.txt"]
UPDATE = {"Image": "same", "Container": "update"}


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter an empty directory, whose `bin` is the PATH."""
    (tmp_path / "bin").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(container_kinds, "POLL_S", 0.0)
    return tmp_path


@pytest.fixture
def docker(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(directory / "bin").here(monkeypatch)


@pytest.fixture
def wheel(directory: Path) -> Path:
    return make_wheel(directory / "wheels", "tsx_serve", "0.1.0")


@pytest.fixture
def deploy(directory: Path, wheel: Path, capsys: pytest.CaptureFixture[str]) -> Deploy:
    make_model(directory / "digits.mar", HANDLER)
    return Deploy(Path("digits.mar"), "container", capsys, [f"--set=build.wheel={wheel}"])


def set_container(engine: Engine, **changes: Any) -> str:
    """Change the state of the container that runs, and return its name."""
    (name,) = engine.running
    state = engine.state
    state["containers"][name] |= changes
    engine.set(**state)
    return name


def test_an_image_is_built_and_its_container_runs_until_it_is_healthy(
    deploy: Deploy, directory: Path, wheel: Path
) -> None:
    docker = Engine(directory / "bin")
    assert actions(deploy.plan(code=2)) == {"Image": "create", "Container": "create"}
    assert docker.running == []
    out = deploy.apply()
    (name,) = docker.running
    assert "healthy" in out
    assert "http://127.0.0.1:8080" in out
    (context,) = docker.state["contexts"]
    assert context == {
        "files": [".dockerignore", "Dockerfile", *LOCKS, "model.mar", wheel.name],
        "target": "server",
    }
    config = docker.state["containers"][name]["Config"]
    assert config["Labels"]["tsx.model"] == "digits/1.0"
    assert (
        "TSX_DEFAULTS=drain_timeout=25 default_startup_timeout=600 disable_token_authorization=true"
        in config["Env"]
    )
    deploy.plan(code=0)


def test_a_new_version_replaces_the_old_one_and_can_be_rolled_back(
    deploy: Deploy, docker: Engine
) -> None:
    deploy.apply()
    first = docker.running
    arguments = "--set=env.TSX_LOG_FORMAT=text"
    assert actions(deploy.plan(arguments, code=2)) == {"Image": "same", "Container": "create"}
    deploy.apply(arguments)
    assert len(docker.state["containers"]) == 2
    assert docker.running != first
    assert deploy.versions == [(1, False), (2, True)]
    deploy.verb("rollback", "--yes")
    assert docker.running == first
    deploy.verb("rollback", "--yes", code=1)
    assert "has no earlier version" in deploy.err


def test_only_as_many_versions_are_kept_as_specified(deploy: Deploy, docker: Engine) -> None:
    for level in ("a", "b", "c", "d"):
        deploy.apply(f"--set=env.A={level}", "--set=keep=2")
    assert len(docker.state["containers"]) == 2


@pytest.mark.parametrize(
    ("health", "error"),
    [("exited", "RuntimeError: no weights"), ("unhealthy", "is running but unhealthy")],
)
def test_an_unhealthy_new_container_is_replaced_by_the_old_one(
    deploy: Deploy, docker: Engine, health: str, error: str
) -> None:
    deploy.apply()
    first = docker.running
    docker.set(healths=[health])
    deploy.apply("--set=env.A=b", code=1)
    assert error in deploy.err
    assert f"{first[0]}, which ran before, was started" in deploy.err
    assert docker.running == first
    assert len(docker.state["containers"]) == 1


def test_a_containers_log_is_shown_and_diagnosed(deploy: Deploy, docker: Engine) -> None:
    deploy.verb("logs", code=1)
    deploy.apply()
    assert "loading digits" in deploy.verb("logs", "--lines=1", "--since=1h")
    docker.set(healths=["exited"], lines=["ModuleNotFoundError: No module named 'cv2'"])
    deploy.apply("--set=env.A=b", code=1)
    assert "no module 'cv2'. Add its package" in deploy.err


@pytest.mark.nightly
def test_the_log_comes_from_the_running_container(deploy: Deploy, directory: Path) -> None:
    Engine(directory / "bin")
    deploy.verb("logs", code=1)
    assert "there is no deployment 'digits'" in deploy.err
    deploy.apply()
    assert deploy.verb("logs", "--lines=5") == "loading digits\nRuntimeError: no weights\n"


@pytest.mark.parametrize("repository", [(), ("--set=repository=registry.example.com/models",)])
def test_purge_removes_old_images_and_keeps_foreign_ones(
    deploy: Deploy, docker: Engine, repository: tuple[str, ...]
) -> None:
    arguments = " ".join(["--set=keep=1", *repository])
    deploy.apply(arguments)
    deploy.apply(arguments, "--set=build.torch=2.8.0")
    own_images = docker.state["images"]
    assert (len(own_images), len(docker.state["containers"])) == (2, 1)
    foreign_images = [
        "digits:1",
        "digits-2:tsx-0123456789ab",
        "registry.example.com/models:tsx-digits-2-0123456789ab",
    ]
    docker.set(images=[*own_images, *foreign_images])
    deploy.verb("destroy", "--yes")
    # A purge also removes them when no container is left.
    deploy.verb("destroy", "--purge", "--yes")
    assert docker.state["images"] == foreign_images


def test_destroy_removes_the_containers_and_purge_their_image(
    deploy: Deploy, docker: Engine
) -> None:
    deploy.apply()
    deploy.apply("--set=env.A=b")
    deploy.verb("destroy", code=1)
    deploy.verb("destroy", "--purge", "--yes")
    assert docker.state["containers"] == {}
    assert docker.state["images"] == []
    deploy.verb("destroy", "--yes", code=1)
    assert "there is no deployment 'digits'" in deploy.err


def test_a_container_reachable_from_other_machines_needs_tokens(
    deploy: Deploy, docker: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    deploy.apply("--set=container.host=0.0.0.0", code=2)
    assert "set TSX_INFERENCE_TOKEN and" in deploy.err
    monkeypatch.setenv("TSX_INFERENCE_TOKEN", "a")
    monkeypatch.setenv("TSX_MANAGEMENT_TOKEN", "b")
    deploy.apply("--set=container.host=0.0.0.0", "--set=container.gpus=1")
    (call,) = docker.calls("run")
    log = "--log-driver json-file --log-opt max-size=20m --log-opt max-file=5"
    assert call[-11:-1] == f"{log} --health-start-interval 2s --gpus 1".split()
    assert "TSX_INFERENCE_TOKEN" in call


def test_podman_and_older_docker_get_only_supported_options() -> None:
    arguments = engine_arguments("podman", "", 1)
    assert arguments == ["--log-opt", "max-size=20m", "--device", "nvidia.com/gpu=0"]
    arguments = engine_arguments("docker", "--health-start-period duration", 0)
    assert "--health-start-interval" not in arguments


def test_a_given_image_is_not_built(deploy: Deploy, docker: Engine) -> None:
    image = ("--image", "registry.example.com/digits:1")
    assert actions(deploy.plan(*image, code=2)) == {"Container": "create"}
    deploy.apply(*image)
    assert docker.calls("build") == []
    assert docker.calls("run")[0][-1] == image[1]


def test_a_stopped_container_is_restarted(deploy: Deploy, docker: Engine) -> None:
    deploy.apply()
    state = {"Running": False, "Status": "exited", "ExitCode": 137}
    name = set_container(docker, State=state)
    assert "it ended with 137" in deploy.verb("status")
    assert actions(deploy.plan(code=2)) == UPDATE
    deploy.apply()
    assert docker.running == [name]


@pytest.mark.nightly
def test_the_error_without_a_working_engine_lists_remedies(deploy: Deploy, directory: Path) -> None:
    deploy.apply(code=1)
    assert "docker is not installed; podman is" in deploy.err
    Engine(directory / "bin", "docker", "podman").set(broken="Cannot connect to the Docker daemon")
    deploy.apply("--set=container.engine=docker", code=1)
    assert "Cannot connect to the Docker daemon" in deploy.err
    deploy.apply("--json")
    assert deploy.read_json("status")["with"] == "podman"


def test_times_are_parsed_in_the_formats_of_docker_and_podman() -> None:
    forms = (
        "2026-11-21T20:00:00.123456789Z",
        "2026-11-21 21:00:00.5 +0100",
        "2026-11-21T15:30:00-04:30",
    )
    assert len({_parse_time(form) for form in forms}) == 1


def test_an_unreachable_server_is_reported(
    deploy: Deploy, docker: Engine, directory: Path, free_ports: Any
) -> None:
    deploy.apply(f"--set=container.port={free_ports(1)[0]}")
    (directory / "in.json").write_text("{}")
    for arguments in (("in.json",), ("--input", "in.json")):
        deploy.verb("invoke", *arguments, code=1)
        assert "/predictions/digits: [Errno" in deploy.err or "refused" in deploy.err
    for arguments in ((), ("in.json", "--input", "in.json")):
        deploy.verb("invoke", *arguments, code=2)
        assert "name one file to send" in deploy.err


def test_an_unhealthy_container_of_an_interrupted_run_is_restarted(
    deploy: Deploy, docker: Engine
) -> None:
    deploy.apply()
    set_container(docker, State={"Running": True, "Health": {"Status": "unhealthy"}})
    assert actions(deploy.plan(code=2)) == UPDATE
    deploy.apply()
    assert docker.calls("stop")
    deploy.plan(code=0)


@pytest.fixture
def podman(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Install a double of podman, on a machine without systemd."""
    engine = Engine(directory / "bin", "podman").here(monkeypatch)
    engine.set(has_systemd=False, version="podman version 4.3.1")
    return engine


def test_health_checks_are_run_for_podman_without_systemd(deploy: Deploy, podman: Engine) -> None:
    deploy.apply()
    (name,) = podman.running
    assert podman.calls("healthcheck", "run", name)
    deploy.plan(code=0)
    # podman still has the state of the last check.
    set_container(podman, health="unhealthy")
    assert deploy.read_json("status")["status"] == "unhealthy"
    assert actions(deploy.plan(code=2)) == UPDATE
    deploy.apply()
    assert deploy.read_json("status")["status"] == "healthy"


def test_a_single_failed_check_does_not_make_a_container_unhealthy(
    deploy: Deploy, podman: Engine
) -> None:
    deploy.apply()
    # A container in the state `busy` fails one check.
    set_container(podman, health="busy")
    check_count = len(podman.calls("healthcheck"))
    assert deploy.read_json("status")["status"] == "healthy"
    assert len(podman.calls("healthcheck")) == check_count + 2


def test_the_health_field_of_podman_3_is_understood() -> None:
    state = {"Running": True, "Healthcheck": {"Status": "starting"}}
    assert container_kinds.health_of({"State": state}) == "starting"


BINARY, ARCHITECTURE = "The image does not start tsx", "built for a different CPU architecture"


@pytest.mark.parametrize(
    ("engine", "code", "text", "cause"),
    [
        ("podman", 125, "container-init binary not found", ""),
        ("podman", 126, "runc create failed: error setting rlimit", ""),
        ("docker", 125, "Bind for 127.0.0.1:8080 failed: port is already allocated", ""),
        ("docker", 127, 'exec: "docker-init": executable file not found in $PATH', ""),
        ("podman", 127, 'exec: "python": executable file not found in $PATH', BINARY),
        ("podman", 127, "executable file `python` not found in $PATH", BINARY),
        ("docker", 126, 'exec: "/app": permission denied', BINARY),
        ("docker", 126, "exec /usr/bin/python: exec format error", ARCHITECTURE),
    ],
)
def test_failures_of_the_engine_and_of_the_image_are_distinguished(
    deploy: Deploy,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
    code: int,
    text: str,
    cause: str,
) -> None:
    Engine(directory / "bin", engine).here(monkeypatch).set(refusal=[code, text])
    deploy.apply(code=1)
    assert text in deploy.err
    (likely,) = [line for line in deploy.err.splitlines() if line.startswith("Likely: ")]
    assert (cause or f"{engine.capitalize()} itself failed") in likely


def test_a_failure_to_restart_the_old_container_is_reported(deploy: Deploy, docker: Engine) -> None:
    deploy.apply()
    (first,) = docker.running
    docker.set(refusal=[125, "no space left on device"])
    deploy.apply("--set=env.A=b", code=1)
    assert f"{first}, which ran before, could not be" in deploy.err
    assert docker.running == []


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"Status": "paused", "Running": False, "ExitCode": 0}, ""),
        ({"Status": "created", "Running": False, "ExitCode": 0}, ""),
        (
            {"Status": "created", "Running": False, "ExitCode": 128, "Error": "no device"},
            "it was not started: no device",
        ),
        (
            {"Status": "exited", "Running": False, "ExitCode": 137, "OOMKilled": True},
            "needs more memory",
        ),
        ({"Status": "exited", "Running": False, "ExitCode": 3}, "it ended with 3"),
    ],
)
def test_the_status_tells_how_a_container_ended(
    deploy: Deploy, docker: Engine, state: Any, reason: str
) -> None:
    deploy.apply()
    set_container(docker, State=state)
    status = deploy.read_json("status")
    assert status["status"] == state["Status"]
    assert reason in (status["reason"] or "")
    assert bool(status["reason"]) == bool(reason)


def test_podman_installed_as_docker_is_recognized(
    deploy: Deploy, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(directory / "bin", "docker", "podman").here(monkeypatch)
    engine.set(version="podman version 4.3.1", has_systemd=False)
    deploy.apply()
    assert deploy.read_json("status")["with"] == "podman"
    assert "--log-driver" not in engine.calls("run")[0]


def test_a_container_that_the_engine_restarts_has_no_exit_code(
    deploy: Deploy, docker: Engine
) -> None:
    deploy.apply()
    docker.set(healths=["restarting"])
    deploy.apply("--set=env.A=b", code=1)
    assert "Its last log lines:" in deploy.err
