"""A double of docker and podman: a program with docker's command line and containers in a file.

`Engine` puts it on the PATH of a test. Its state controls the containers: `healths` are the health
states of the next started containers. Without `has_systemd`, containers are reported as starting
until `healthcheck run` checks them, as in podman. `refusal` is the exit code and the text of a
failing start. It runs as a program (`python -IS docker.py`), so it imports only the standard
library.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

STATE = "state.json"
EMPTY: dict[str, Any] = {
    "containers": {},
    "images": [],
    "digests": {},
    "pushed": [],
    "healths": [],
    "version": "double 1.0",
    "has_systemd": True,
    "refusal": None,
    "calls": [],
    "logins": {},
    "broken": "",
    "broken_buildx": False,
    "contexts": [],
    "lines": ["loading digits", "RuntimeError: no weights"],
}


class Engine:
    """The program under several names in a directory, which a test puts first on the PATH."""

    def __init__(self, directory: Path, *names: str) -> None:
        self.directory = directory
        self._file = directory / STATE
        self._file.write_text(json.dumps(EMPTY))
        for name in names or ("docker",):
            program = directory / name
            program.write_text(
                f"#!{sys.executable} -IS\n" + Path(__file__).read_text(encoding="utf-8")
            )
            program.chmod(0o755)

    def here(self, patch: pytest.MonkeyPatch) -> Engine:
        """Answer calls in this process, without starting a program for each.

        At least one test starts the program.
        """
        from tsx_cli.deploy.image.programs import Program

        def run_unchecked(
            program: Program, *arguments: str, stdin: str | None = None, **more: Any
        ) -> subprocess.CompletedProcess[str]:
            with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
                patch.setattr(sys, "stdin", io.StringIO(stdin or ""))
                code = main(self.directory, [*program.base_arguments, *arguments])
            return subprocess.CompletedProcess(
                [program.name, *arguments], code, out.getvalue(), err.getvalue()
            )

        patch.setattr(Program, "run_unchecked", run_unchecked)
        return self

    @property
    def state(self) -> dict[str, Any]:
        return dict(json.loads(self._file.read_text()))

    def set(self, **more: Any) -> None:
        self._file.write_text(json.dumps({**self.state, **more}))

    @property
    def running(self) -> list[str]:
        return [
            name
            for name, container in self.state["containers"].items()
            if container["State"]["Running"]
        ]

    def calls(self, *beginning: str) -> list[list[str]]:
        return [call for call in self.state["calls"] if call[: len(beginning)] == list(beginning)]


@contextmanager
def held(directory: Path) -> Iterator[dict[str, Any]]:
    file = directory / STATE
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        state = json.loads(file.read_text())
        yield state
        file.write_text(json.dumps(state))


def main(directory: Path, arguments: list[str]) -> int:
    with held(directory) as state:
        state["calls"].append(arguments)
        if arguments[0] == "version":
            if state["broken"]:
                return fail(state["broken"])
            print("28.2.2")
            return 0
        if arguments[0] == "--version":
            print(state["version"])
            return 0
        return VERBS[arguments[0]](state, arguments[1:])


def fail(text: str, code: int = 1) -> int:
    print(text, file=sys.stderr)
    return code


def values(arguments: list[str], name: str) -> list[str]:
    return [arguments[index + 1] for index, argument in enumerate(arguments) if argument == name]


def build(state: dict[str, Any], arguments: list[str]) -> int:
    directory = Path(arguments[-1])
    state["contexts"].append(
        {
            "files": sorted(path.name for path in directory.iterdir()),
            "target": values(arguments, "--target")[0],
        }
    )
    if "FROM" not in (directory / "Dockerfile").read_text():
        return fail("ERROR: no FROM")
    state["images"].append(values(arguments, "--tag")[0])
    return 0


def image(state: dict[str, Any], arguments: list[str]) -> int:
    if arguments[0] == "ls":
        assert arguments[1:] == ["--format", "{{.Repository}}:{{.Tag}}"]
        print("\n".join([*state["images"], "python:3.12-slim", "<none>:<none>"]))
        return 0
    if arguments[-1] not in state["images"]:
        return fail(f"Error: No such image: {arguments[-1]}")
    if arguments[0] == "rm":
        state["images"].remove(arguments[-1])
    elif "--format" in arguments:
        print(
            json.dumps(
                [
                    f"{reference.rpartition(':')[0]}@{digest(reference)}"
                    for reference in state["pushed"]
                    if reference == arguments[-1]
                ]
            )
        )
    return 0


def digest(reference: str) -> str:
    """Return the digest of the image that is pushed with this reference."""
    return f"sha256:{hashlib.sha256(reference.encode()).hexdigest()}"


def buildx(state: dict[str, Any], arguments: list[str]) -> int:
    if arguments == ["version"]:
        return fail("docker: 'buildx' is not a docker command.") if state["broken_buildx"] else 0
    if arguments[-1] in state["digests"]:  # an image in another registry
        print(state["digests"][arguments[-1]])
        return 0
    if arguments[-1] not in state["pushed"] or state["broken_buildx"]:
        return fail(
            "not found"
            if arguments[-1] not in state["pushed"]
            else "docker: 'buildx' is not a docker command."
        )
    print(digest(arguments[-1]))
    return 0


def push(state: dict[str, Any], arguments: list[str]) -> int:
    registry = arguments[-1].partition("/")[0]
    if state["logins"] and registry not in state["logins"]:
        return fail("no basic auth credentials")
    state["pushed"].append(arguments[-1])
    print(
        f"5f4fe3091b70: Pushed\n{arguments[-1].rpartition(':')[2]}: digest: {digest(arguments[-1])} size: 524"
    )
    return 0


def manifest(state: dict[str, Any], arguments: list[str]) -> int:
    return 0 if arguments[-1] in state["pushed"] else fail("no such manifest")


def login(state: dict[str, Any], arguments: list[str]) -> int:
    state["logins"][arguments[-1]] = [values(arguments, "--username")[0], sys.stdin.read()]
    return 0


def healthcheck(state: dict[str, Any], arguments: list[str]) -> int:
    assert arguments[0] == "run"
    container = state["containers"].get(arguments[1])
    if container is None or not container["State"]["Running"]:
        return fail(f"Error: {arguments[1]} is not running", 125)
    health = container["State"]["Health"]
    is_well = container["health"] == "healthy"
    container["health"] = container["health"].replace(
        "busy", "healthy"
    )  # a busy container fails only one check
    health["FailingStreak"] = 0 if is_well else health.get("FailingStreak", 0) + 1
    if is_well:
        health["Status"] = "healthy"  # a failure of the start period is not counted
    return 0 if is_well else 1


def run(state: dict[str, Any], arguments: list[str]) -> int:
    if arguments == ["--help"]:
        state["calls"].pop()  # the call starts no container
        print(
            "      --health-start-interval duration   Time between running the check during the start period"
        )
        return 0
    name = values(arguments, "--name")[0]
    if name in state["containers"]:
        return fail(f"Conflict. The container name {name} is already in use")
    ports = values(arguments, "--publish")
    if any(
        set(ports) & set(container["Ports"]) and container["State"]["Running"]
        for container in state["containers"].values()
    ):
        return fail("Bind for 127.0.0.1:8080 failed: port is already allocated")
    labels = dict(label.split("=", 1) for label in values(arguments, "--label"))
    bindings = {}
    for port in ports:
        host, outside, inside = port.rsplit(":", 2)
        bindings[f"{inside}/tcp"] = [{"HostIp": host.strip("[]"), "HostPort": outside}]
    state["containers"][name] = {
        "Name": f"/{name}",
        "Created": f"2026-11-21T20:00:{len(state['containers']):02}.123456789Z",
        "Config": {"Labels": labels, "Image": arguments[-1], "Env": values(arguments, "--env")},
        "HostConfig": {"PortBindings": bindings},
        "Ports": ports,
        "RestartCount": 0,
        "State": {"Running": False, "Status": "created", "ExitCode": 0},
    }
    return begin(state, name)


def begin(state: dict[str, Any], name: str) -> int:
    if state["refusal"]:
        return fail(state["refusal"][1], state["refusal"][0])
    health = state["healths"].pop(0) if state["healths"] else "healthy"
    state["containers"][name]["RestartCount"] = int(health == "restarting")
    health = health.replace("restarting", "starting")
    runs = health in ("healthy", "starting", "unhealthy")
    code = 0 if runs else 1
    state["containers"][name]["health"] = health
    state["containers"][name]["State"] = {
        "Running": runs,
        "Status": "running" if runs else "exited",
        "ExitCode": code,
        "StartedAt": "2026-11-21T20:00:00Z",
        "Health": {"Status": health if state["has_systemd"] else "starting"} if runs else {},
    }
    return 0


def start(state: dict[str, Any], arguments: list[str]) -> int:
    return begin(state, arguments[0])


def stop(state: dict[str, Any], arguments: list[str]) -> int:
    state["containers"][arguments[0]]["State"] |= {
        "Running": False,
        "Status": "exited",
        "ExitCode": 0,
    }
    return 0


def rm(state: dict[str, Any], arguments: list[str]) -> int:
    if state["containers"][arguments[-1]]["State"]["Running"] and "--force" not in arguments:
        return fail("cannot remove a running container")
    del state["containers"][arguments[-1]]
    return 0


def ps(state: dict[str, Any], arguments: list[str]) -> int:
    required_labels = dict(
        label.removeprefix("label=").split("=", 1) for label in values(arguments, "--filter")
    )
    for name, container in state["containers"].items():
        if required_labels.items() <= container["Config"]["Labels"].items():
            print(name)
    return 0


def inspect(state: dict[str, Any], arguments: list[str]) -> int:
    containers = [state["containers"].get(name) for name in arguments[2:]]
    if None in containers:
        print("[]")
        return fail(f"Error: No such container: {arguments[-1]}")
    print(json.dumps(containers))
    return 0


def logs(state: dict[str, Any], arguments: list[str]) -> int:
    print("\n".join(state["lines"]))
    return 0


VERBS = {
    verb.__name__: verb
    for verb in (
        build,
        buildx,
        healthcheck,
        image,
        push,
        manifest,
        login,
        run,
        start,
        stop,
        rm,
        ps,
        inspect,
        logs,
    )
}

if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[0]).parent, sys.argv[1:]))
