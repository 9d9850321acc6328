"""`tsx deploy --target container`, against a double of docker: started, unchanged, replaced, gone
back, put back, removed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.deploying import HANDLER, Deploy, actions
from tests.support.models import make_model
from tests.support.platforms.docker import Engine
from tests.support.wheels import make_wheel
from tsx_cli.deploy.container import kinds as container_kinds
from tsx_cli.deploy.container.deployment import _time
from tsx_cli.deploy.container.resources import engine_words

LOCKS = ["locked-base.txt", "locked-lambda.txt", "locked-sbom.txt"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory to work in; `bin` is first on the PATH, and nothing that works with containers is
    behind it.
    """
    (tmp_path / "bin").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(container_kinds, "POLL", 0.0)
    return tmp_path


@pytest.fixture
def docker(place: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(place / "bin").here(monkeypatch)


@pytest.fixture
def deploy(place: Path, capsys: pytest.CaptureFixture[str]) -> Deploy:
    make_model(place / "digits.mar", HANDLER)
    return Deploy(Path("digits.mar"), "container", capsys, [f"--set=build.wheel={wheel(place)}"])


def wheel(place: Path) -> Path:
    return make_wheel(place / "wheels", "tsx_serve", "0.1.0")


@pytest.mark.usefixtures("processes")
def test_an_image_is_built_and_its_container_runs_until_it_is_well(
    deploy: Deploy, place: Path
) -> None:
    docker = Engine(place / "bin")
    assert actions(deploy.plan(code=2)) == {"Image": "create", "Container": "create"}
    assert docker.running == []
    out = deploy.apply()
    (name,) = docker.running
    assert "healthy" in out
    assert "http://127.0.0.1:8080" in out
    (built,) = docker.state["contexts"]
    assert built == {
        "files": [".dockerignore", "Dockerfile", *LOCKS, "model.mar", wheel(place).name],
        "target": "server",
    }
    found = docker.state["containers"][name]
    assert found["Config"]["Labels"]["tsx.model"] == "digits/1.0"
    assert (
        "TSX_DEFAULTS=drain_timeout=25 default_startup_timeout=600 disable_token_authorization=true"
        in found["Config"]["Env"]
    )
    assert actions(deploy.plan(code=0)) == {"Image": "same", "Container": "same"}
    deploy.apply()
    assert len(docker.calls("run")) == len(docker.calls("build")) == 1


def test_a_new_version_takes_the_place_of_the_one_before_and_can_be_gone_back_from(
    deploy: Deploy, docker: Engine
) -> None:
    deploy.apply()
    first = docker.running
    assert actions(deploy.plan("--set=env.TSX_LOG_FORMAT=text", code=2)) == {
        "Image": "same",
        "Container": "create",
    }
    deploy.apply("--set=env.TSX_LOG_FORMAT=text")
    assert len(docker.state["containers"]) == 2
    assert docker.running != first
    versions = deploy.reported("history")
    assert [(each["number"], each["is_current"]) for each in versions] == [(1, False), (2, True)]
    deploy.verb("rollback", "--yes")
    assert docker.running == first
    deploy.verb("rollback", "--yes", code=1)
    assert "has no earlier version" in deploy.err


def test_earlier_versions_beyond_those_that_are_kept_go(deploy: Deploy, docker: Engine) -> None:
    for level in ("a", "b", "c", "d"):
        deploy.apply(f"--set=env.A={level}", "--set=keep=2")
    assert len(docker.state["containers"]) == 2


@pytest.mark.parametrize(
    ("health", "said"),
    [
        ("exited", "RuntimeError: no weights"),
        ("unhealthy", "is running but unhealthy"),
    ],
)
def test_one_that_does_not_get_well_makes_way_for_the_one_before(
    deploy: Deploy, docker: Engine, health: str, said: str
) -> None:
    deploy.apply()
    first = docker.running
    docker.set(healths=["starting" if health == "never" else health])
    deploy.apply("--set=env.A=b", code=1)
    assert said in deploy.err
    assert f"{first[0]}, which ran before, was started" in deploy.err
    assert docker.running == first
    assert len(docker.state["containers"]) == 1


@pytest.mark.usefixtures("processes")
def test_what_a_container_says_is_shown_and_what_its_last_words_mean_is_reported(
    deploy: Deploy, docker: Engine
) -> None:
    deploy.verb("logs", code=1)
    deploy.apply()
    assert "loading digits" in deploy.verb("logs", "--lines=1", "--since=1h")
    docker.set(healths=["exited"], lines=["ModuleNotFoundError: No module named 'cv2'"])
    deploy.apply("--set=env.A=b", code=1)
    assert "no module 'cv2'. Add its package" in deploy.err


@pytest.mark.usefixtures("processes")
def test_the_log_is_that_of_the_one_that_runs(deploy: Deploy, place: Path) -> None:
    Engine(place / "bin")
    deploy.verb("logs", code=1)
    assert "there is no deployment 'digits'" in deploy.err
    deploy.apply()
    assert deploy.verb("logs", "--lines=5") == "loading digits\nRuntimeError: no weights\n"


@pytest.mark.parametrize("repository", [(), ("--set=repository=registry.example.com/models",)])
def test_purge_also_removes_images_of_versions_that_are_gone_and_none_of_others(
    deploy: Deploy, docker: Engine, repository: tuple[str, ...]
) -> None:
    deploy.apply("--set=keep=1", *repository)
    deploy.apply("--set=keep=1", "--set=build.torch=2.8.0", *repository)
    ours = docker.state["images"]
    assert (len(ours), len(docker.state["containers"])) == (2, 1)
    others = [
        "digits:1",
        "digits-2:tsx-0123456789ab",
        "registry.example.com/models:tsx-digits-2-0123456789ab",
    ]
    docker.set(images=[*ours, *others])
    deploy.verb("destroy", "--yes")
    deploy.verb("destroy", "--purge", "--yes")  # also when nothing else is left
    assert docker.state["images"] == others


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


def test_where_others_reach_it_tokens_are_asked_for_first(
    deploy: Deploy, docker: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    deploy.apply("--set=container.host=0.0.0.0", code=2)
    assert (
        "set TSX_INFERENCE_TOKEN and"
        in deploy.err
    )
    monkeypatch.setenv("TSX_INFERENCE_TOKEN", "a")
    monkeypatch.setenv("TSX_MANAGEMENT_TOKEN", "b")
    deploy.apply("--set=container.host=0.0.0.0", "--set=container.gpus=1")
    (call,) = docker.calls("run")
    assert call[-3:-1] == ["--gpus", "1"]
    assert call[-11:-3] == [
        "--log-driver",
        "json-file",
        "--log-opt",
        "max-size=20m",
        "--log-opt",
        "max-file=5",
        "--health-start-interval",
        "2s",
    ]
    assert "TSX_INFERENCE_TOKEN" in call


def test_podman_and_an_older_docker_get_only_what_they_know() -> None:
    assert engine_words("podman", "", 1) == [
        "--log-opt",
        "max-size=20m",
        "--device",
        "nvidia.com/gpu=0",
    ]
    assert "--health-start-interval" not in engine_words(
        "docker", "--health-start-period duration", 0
    )


def test_a_given_image_is_not_built(deploy: Deploy, docker: Engine) -> None:
    assert actions(deploy.plan("--image", "registry.example.com/digits:1", code=2)) == {
        "Container": "create"
    }
    deploy.apply("--image", "registry.example.com/digits:1")
    assert docker.calls("build") == []
    assert docker.calls("run")[0][-1] == "registry.example.com/digits:1"


@pytest.mark.usefixtures("processes")
def test_a_container_that_has_stopped_is_started_again(deploy: Deploy, docker: Engine) -> None:
    deploy.apply()
    (name,) = docker.running
    state = docker.state
    state["containers"][name]["State"] |= {"Running": False, "Status": "exited", "ExitCode": 137}
    docker.set(**state)
    assert "it ended with 137" in deploy.verb("status")
    assert actions(deploy.plan(code=2)) == {"Image": "same", "Container": "update"}
    deploy.apply()
    assert docker.running == [name]


@pytest.mark.usefixtures("processes")
def test_without_a_program_that_works_the_ways_out_are_reported(
    deploy: Deploy, place: Path
) -> None:
    deploy.apply(code=1)
    assert (
        "docker is not installed; podman is"
        in deploy.err
    )
    Engine(place / "bin", "docker", "podman").set(broken="Cannot connect to the Docker daemon")
    deploy.apply("--set=container.engine=docker", code=1)
    assert "Cannot connect to the Docker daemon" in deploy.err
    assert '"with": "podman"' in (deploy.apply("--json") and deploy.verb("status", "--json"))


def test_times_are_read_as_docker_and_podman_write_them() -> None:
    assert (
        _time("2026-11-21T20:00:00.123456789Z")
        == _time("2026-11-21 21:00:00.5 +0100")
        == _time("2026-11-21T15:30:00-04:30")
    )


def test_a_server_that_is_not_there_is_reported(
    deploy: Deploy, docker: Engine, place: Path, free_ports: Any
) -> None:
    deploy.apply(f"--set=container.port={free_ports(1)[0]}")
    (place / "in.json").write_text("{}")
    for words in (("in.json",), ("--input", "in.json")):
        deploy.verb("invoke", *words, code=1)
        assert "/predictions/digits: [Errno" in deploy.err or "refused" in deploy.err
    for words in ((), ("in.json", "--input", "in.json")):
        deploy.verb("invoke", *words, code=2)
        assert "name one file to send" in deploy.err


def test_one_that_was_left_while_it_started_and_is_not_well_is_started_again(
    deploy: Deploy, docker: Engine
) -> None:
    deploy.apply()
    (name,) = docker.running
    state = docker.state
    state["containers"][name]["State"]["Health"] = {"Status": "unhealthy"}
    docker.set(**state)
    assert actions(deploy.plan(code=2)) == {"Image": "same", "Container": "update"}
    deploy.apply()
    assert docker.calls("stop")
    assert actions(deploy.plan(code=0)) == {"Image": "same", "Container": "same"}


@pytest.fixture
def podman(place: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """podman on a machine without systemd."""
    engine = Engine(place / "bin", "podman").here(monkeypatch)
    engine.set(has_systemd=False, version="podman version 4.3.1")
    return engine


def test_podman_without_systemd_asks_the_container_for_its_health(
    deploy: Deploy, podman: Engine
) -> None:
    deploy.apply()
    (name,) = podman.running
    assert podman.calls("healthcheck", "run", name)
    assert actions(deploy.plan(code=0)) == {"Image": "same", "Container": "same"}
    state = podman.state
    state["containers"][name]["health"] = (
        "unhealthy"  # it hangs now, and podman still has the state of the last check
    )
    podman.set(**state)
    assert deploy.reported("status")["status"] == "unhealthy"
    assert actions(deploy.plan(code=2)) == {"Image": "same", "Container": "update"}
    deploy.apply()
    assert deploy.reported("status")["status"] == "healthy"


def test_one_check_that_fails_does_not_make_a_container_unhealthy(
    deploy: Deploy, podman: Engine
) -> None:
    deploy.apply()
    (name,) = podman.running
    state = podman.state
    state["containers"][name]["health"] = "busy"  # fails one check
    podman.set(**state)
    before = len(podman.calls("healthcheck"))
    assert deploy.reported("status")["status"] == "healthy"
    assert len(podman.calls("healthcheck")) == before + 2


def test_podman_3_has_its_own_name_for_the_health() -> None:
    state = {"Running": True, "Healthcheck": {"Status": "starting"}}
    assert container_kinds.health_of({"State": state}) == "starting"


@pytest.mark.parametrize(
    ("engine", "code", "text", "cause"),
    [
        (
            "podman",
            125,
            "container-init binary not found",
            "",
        ),
        (
            "podman",
            126,
            "runc create failed: error setting rlimit",
            "",
        ),
        (
            "docker",
            125,
            "port is already allocated",
            "",
        ),
        (
            "docker",
            127,
            "\"docker-init\": executable file not found",
            "",
        ),
        (
            "podman",
            127,
            'Error: runc: exec: "python": executable file not found in $PATH',
            "The image does not start tsx",
        ),
        (
            "podman",
            127,
            "Error: crun: executable file `python` not found in $PATH: No such file or directory",
            "The image does not start tsx",
        ),
        (
            "docker",
            126,
            'docker: OCI runtime create failed: exec: "/app": permission denied',
            "The image does not start tsx",
        ),
        (
            "docker",
            126,
            "docker: exec /usr/bin/python: exec format error",
            "built for a different CPU architecture",
        ),
    ],
)
def test_a_failure_of_the_engine_is_told_from_one_of_the_image(
    deploy: Deploy,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    engine: str,
    code: int,
    text: str,
    cause: str,
) -> None:
    double = Engine(place / "bin", engine).here(monkeypatch)
    double.set(refusal=[code, text])
    deploy.apply(code=1)
    assert text in deploy.err
    expected = (
        cause
        or f"{engine.capitalize()} itself failed, before anything of the image was started. Its message says what"
    )
    (likely,) = [line for line in deploy.err.splitlines() if line.startswith("Likely: ")]
    assert likely.startswith(f"Likely: {expected}")


def test_what_cannot_be_started_again_is_reported_as_down(deploy: Deploy, docker: Engine) -> None:
    deploy.apply()
    (first,) = docker.running
    docker.set(refusal=[125, "no space left on device"])
    deploy.apply("--set=env.A=b", code=1)
    assert (
        f"{first}, which ran before, could not be"
        in deploy.err
    )
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
def test_the_status_says_how_a_container_came_to_its_end(
    deploy: Deploy, docker: Engine, state: Any, reason: str
) -> None:
    deploy.apply()
    (name,) = docker.running
    containers = docker.state["containers"]
    containers[name]["State"] = state
    docker.set(containers=containers)
    status = deploy.reported("status")
    assert status["status"] == state["Status"]
    assert (status["reason"] or "").startswith(reason)
    assert bool(status["reason"]) == bool(reason)


def test_podman_under_the_name_of_docker_is_known_as_podman(
    deploy: Deploy, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(place / "bin", "docker", "podman").here(monkeypatch)
    engine.set(version="podman version 4.3.1", has_systemd=False)
    deploy.apply()
    assert deploy.reported("status")["with"] == "podman"
    assert "--log-driver" not in engine.calls("run")[0]


def test_a_container_that_the_engine_starts_again_has_no_exit_code(
    deploy: Deploy, docker: Engine
) -> None:
    deploy.apply()
    docker.set(healths=["restarting"])
    deploy.apply("--set=env.A=b", code=1)
    assert "Its last log lines:" in deploy.err
