"""docker's and podman's place on the PATH: a program that speaks docker's documented words and
keeps its containers in a file.

`Engine` puts it there for a test. How containers get on is told to it: `healths` are the states of
the next ones, one for each that starts. Without `has_systemd` it reports them as starting until
`healthcheck run` asks them, as podman does. `refusal` is the exit code and the text with which it
starts nothing. It runs by itself (`python -IS docker.py`), so it imports nothing but the standard
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
    """The program under one or several names, in a directory of its own that a test puts first on
    the PATH.
    """

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
        """In this process, which spares each call the start of a program.

        A test at least has to do without.
        """
        from tsx_cli.deploy.image.programs import Program

        def try_(
            program: Program, *words: str, stdin: str | None = None, **more: Any
        ) -> subprocess.CompletedProcess[str]:
            with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
                patch.setattr(sys, "stdin", io.StringIO(stdin or ""))
                code = main(self.directory, [*program.first, *words])
            return subprocess.CompletedProcess(
                [program.name, *words], code, out.getvalue(), err.getvalue()
            )

        patch.setattr(Program, "try_", try_)
        return self

    @property
    def state(self) -> dict[str, Any]:
        return dict(json.loads(self._file.read_text()))

    def set(self, **more: Any) -> None:
        self._file.write_text(json.dumps({**self.state, **more}))

    @property
    def running(self) -> list[str]:
        return [name for name, each in self.state["containers"].items() if each["State"]["Running"]]

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


def main(directory: Path, words: list[str]) -> int:
    with held(directory) as state:
        state["calls"].append(words)
        if words[0] == "version":
            if state["broken"]:
                return fail(state["broken"])
            print("28.2.2")
            return 0
        if words[0] == "--version":
            print(state["version"])
            return 0
        return VERBS[words[0]](state, words[1:])


def fail(text: str, code: int = 1) -> int:
    print(text, file=sys.stderr)
    return code


def values(words: list[str], name: str) -> list[str]:
    return [words[place + 1] for place, word in enumerate(words) if word == name]


def build(state: dict[str, Any], words: list[str]) -> int:
    place = Path(words[-1])
    state["contexts"].append(
        {
            "files": sorted(path.name for path in place.iterdir()),
            "target": values(words, "--target")[0],
        }
    )
    if "FROM" not in (place / "Dockerfile").read_text():
        return fail("ERROR: no FROM")
    state["images"].append(values(words, "--tag")[0])
    return 0


def image(state: dict[str, Any], words: list[str]) -> int:
    if words[0] == "ls":
        assert words[1:] == ["--format", "{{.Repository}}:{{.Tag}}"]
        print("\n".join([*state["images"], "python:3.12-slim", "<none>:<none>"]))
        return 0
    if words[-1] not in state["images"]:
        return fail(f"Error: No such image: {words[-1]}")
    if words[0] == "rm":
        state["images"].remove(words[-1])
    elif "--format" in words:
        print(
            json.dumps(
                [
                    f"{each.rpartition(':')[0]}@{digest(each)}"
                    for each in state["pushed"]
                    if each == words[-1]
                ]
            )
        )
    return 0


def digest(reference: str) -> str:
    """Of what is pushed under this name."""
    return f"sha256:{hashlib.sha256(reference.encode()).hexdigest()}"


def buildx(state: dict[str, Any], words: list[str]) -> int:
    if words == ["version"]:
        return fail("docker: 'buildx' is not a docker command.") if state["broken_buildx"] else 0
    if words[-1] in state["digests"]:  # of images of others
        print(state["digests"][words[-1]])
        return 0
    if words[-1] not in state["pushed"] or state["broken_buildx"]:
        return fail(
            "not found"
            if words[-1] not in state["pushed"]
            else "docker: 'buildx' is not a docker command."
        )
    print(digest(words[-1]))
    return 0


def push(state: dict[str, Any], words: list[str]) -> int:
    registry = words[-1].partition("/")[0]
    if state["logins"] and registry not in state["logins"]:
        return fail("no basic auth credentials")
    state["pushed"].append(words[-1])
    print(
        f"5f4fe3091b70: Pushed\n{words[-1].rpartition(':')[2]}: digest: {digest(words[-1])} size: 524"
    )
    return 0


def manifest(state: dict[str, Any], words: list[str]) -> int:
    return 0 if words[-1] in state["pushed"] else fail("no such manifest")


def login(state: dict[str, Any], words: list[str]) -> int:
    state["logins"][words[-1]] = [values(words, "--username")[0], sys.stdin.read()]
    return 0


def healthcheck(state: dict[str, Any], words: list[str]) -> int:
    assert words[0] == "run"
    own = state["containers"].get(words[1])
    if own is None or not own["State"]["Running"]:
        return fail(f"Error: {words[1]} is not running", 125)
    health = own["State"]["Health"]
    is_well = own["health"] == "healthy"
    own["health"] = own["health"].replace("busy", "healthy")  # fails one check
    health["FailingStreak"] = 0 if is_well else health.get("FailingStreak", 0) + 1
    if is_well:
        health["Status"] = "healthy"  # a failure of the start period is not counted
    return 0 if is_well else 1


def run(state: dict[str, Any], words: list[str]) -> int:
    if words == ["--help"]:
        state["calls"].pop()  # it starts nothing
        print(
            "      --health-start-interval duration   Time between running the check during the start period"
        )
        return 0
    name = values(words, "--name")[0]
    if name in state["containers"]:
        return fail(f"Conflict. The container name {name} is already in use")
    ports = values(words, "--publish")
    if any(
        set(ports) & set(each["Ports"]) and each["State"]["Running"]
        for each in state["containers"].values()
    ):
        return fail("Bind for 127.0.0.1:8080 failed: port is already allocated")
    labels = dict(label.split("=", 1) for label in values(words, "--label"))
    bindings = {}
    for port in ports:
        host, outside, inside = port.rsplit(":", 2)
        bindings[f"{inside}/tcp"] = [{"HostIp": host.strip("[]"), "HostPort": outside}]
    state["containers"][name] = {
        "Name": f"/{name}",
        "Created": f"2026-11-21T20:00:{len(state['containers']):02}.123456789Z",
        "Config": {"Labels": labels, "Image": words[-1], "Env": values(words, "--env")},
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
    health = health.replace("restarting", "starting")  # it has ended, and was started again
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


def start(state: dict[str, Any], words: list[str]) -> int:
    return begin(state, words[0])


def stop(state: dict[str, Any], words: list[str]) -> int:
    state["containers"][words[0]]["State"] |= {"Running": False, "Status": "exited", "ExitCode": 0}
    return 0


def rm(state: dict[str, Any], words: list[str]) -> int:
    if state["containers"][words[-1]]["State"]["Running"] and "--force" not in words:
        return fail("cannot remove a running container")
    del state["containers"][words[-1]]
    return 0


def ps(state: dict[str, Any], words: list[str]) -> int:
    wanted = dict(each.removeprefix("label=").split("=", 1) for each in values(words, "--filter"))
    for name, each in state["containers"].items():
        if wanted.items() <= each["Config"]["Labels"].items():
            print(name)
    return 0


def inspect(state: dict[str, Any], words: list[str]) -> int:
    found = [state["containers"].get(name) for name in words[2:]]
    if None in found:
        print("[]")
        return fail(f"Error: No such container: {words[-1]}")
    print(json.dumps(found))
    return 0


def logs(state: dict[str, Any], words: list[str]) -> int:
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
