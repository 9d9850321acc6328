"""The state of a deployment on this machine: its containers, one of which runs, and its answers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from tsx_cli.common.client import Response, Server, path
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.deploy.container.kinds import ContainerHost, ending_of, health_of, labels_of, tags_of
from tsx_cli.deploy.container.resources import INSIDE, OPEN, run_words, wants_tokens
from tsx_cli.deploy.engine.facts import Facts
from tsx_cli.deploy.engine.facts import tags_of as tags_of_spec
from tsx_cli.deploy.engine.kind import CloudError
from tsx_cli.deploy.engine.platform import DeployedVersion
from tsx_cli.deploy.engine.resources import Resource, digest, numbered
from tsx_cli.deploy.spec import DeploySpec

KIND, IMAGE = "Tsx::Container::Container", "Tsx::Container::Image"
OWN_IMAGE = "tsx.built"  # the label of a container whose image was built for it


class ContainerTarget:
    def wanted(self, cloud: ContainerHost, spec: DeploySpec, facts: Facts) -> list[Resource]:
        """Raises UsageError where others reach it and no token is there for them."""
        missing = [name for name in wants_tokens(spec) if not os.environ.get(name)]
        if missing:
            raise UsageError(
                f"container.host is {spec.container.host}, which other machines can reach: set"
                f" {' and '.join(missing)} in this command's environment, or env.{OPEN}=true to"
                " serve without"
            )
        image = str(facts.image)
        tags = tags_of_spec(spec, facts)
        labels = {**tags, **({OWN_IMAGE: image} if spec.image is None else {})}
        say = {key: value for key, value in labels.items() if key != "tsx:spec-sha"}
        name = f"tsx-{spec.name}-{digest(run_words(spec, image, name='', labels=say))}"
        properties = {
            "Running": True,
            "Words": run_words(spec, image, name=name, labels=labels),
            "Gpus": spec.container.gpus,
            "Patience": spec.container.startup_timeout,
            "Deployment": spec.name,
            "Image": image,
        }
        return [Resource("Container", KIND, name, properties, ("Image",), tags)]

    def belongings(self, cloud: ContainerHost, name: str, *, purge: bool = False) -> list[Resource]:
        there = cloud.containers(name)
        found = numbered("Container", KIND, map(_name, there), ("Images",))
        if purge:
            images = sorted(
                {
                    *cloud.images(name),
                    *(labels_of(each)[OWN_IMAGE] for each in there if OWN_IMAGE in labels_of(each)),
                }
            )
            found = numbered("Image", IMAGE, images) + found
        return found

    def obsolete(
        self, cloud: ContainerHost, spec: DeploySpec, wanted: Sequence[Resource]
    ) -> list[Resource]:
        names = {each.name for each in wanted}
        others = [each for each in self.belongings(cloud, spec.name) if each.name not in names]
        return others[: -(spec.keep - 1) or None]

    def versions(self, cloud: ContainerHost, name: str) -> list[DeployedVersion]:
        return [
            DeployedVersion(
                number,
                _name(each),
                _time(each["Created"]),
                tags_of(each),
                bool(each["State"].get("Running")),
            )
            for number, each in enumerate(cloud.containers(name), start=1)
        ]

    def going_back(
        self, cloud: ContainerHost, name: str, version: DeployedVersion
    ) -> list[Resource]:
        return [
            Resource(
                "Container",
                KIND,
                version.id,
                {"Running": True, "Deployment": name, "Patience": 600},
                tags=version.tags,
            )
        ]

    def promoting(self, cloud: ContainerHost, name: str) -> list[Resource]:
        raise CliError(
            "a container deployment has no canary to promote: only one container runs at a time"
        )

    def status(self, cloud: ContainerHost, name: str) -> dict[str, Any] | None:
        there = cloud.containers(name)
        if not there:
            return None
        current = next((each for each in there if each["State"].get("Running")), there[-1])
        current = cloud.container(_name(current)) or current
        state, tags = current["State"], tags_of(current)
        has_ended = not state.get("Running") and state.get("Status") not in ("paused", "created")
        return {
            "name": name,
            "target": "container",
            "status": health_of(current),
            "reason": f"it {ending_of(state)}" if has_ended or state.get("Error") else "",
            "model": tags.get("tsx:model"),
            "image": current["Config"].get("Image"),
            "container": _name(current),
            "address": _address(current),
            "since": state.get("StartedAt"),
            "restarts": current.get("RestartCount") or None,
            "with": cloud.program.name,
        }

    def invoke(
        self, cloud: ContainerHost, name: str, body: bytes, content_type: str, accept: str | None
    ) -> Response:
        there = [each for each in cloud.containers(name) if each["State"].get("Running")]
        if not there:
            raise CloudError(f"{name} does not run; see `tsx deploy status`")
        model = tags_of(there[0]).get("tsx:model", name).partition("/")[0]
        return predict(_address(there[0]), model, body, content_type, accept)

    def logs(
        self, cloud: ContainerHost, name: str, *, lines: int, since: str | None, follow: bool
    ) -> Iterator[str]:
        """Of the one that runs, else of the newest. Raises CliError where there is none."""
        there = cloud.containers(name)
        if not there:
            raise CliError(f"there is no deployment '{name}' on {cloud.region}")
        current = next((each for each in there if each["State"].get("Running")), there[-1])
        words = log_words(lines, since, follow=follow)
        return cloud.program.lines("logs", *words, _name(current))


def log_words(lines: int, since: str | None, *, follow: bool) -> list[str]:
    """As docker, podman and kubectl take them."""
    ends = [*(["--since", since] if since else []), *(["--follow"] if follow else [])]
    return ["--tail", str(lines), *ends]


def predict(
    address: str,
    model: str,
    body: bytes,
    content_type: str,
    accept: str | None,
    token: str | None = None,
) -> Response:
    """With the token, or that of the environment; the answer has arrived whole. Raises CliError."""
    token = token or os.environ.get("TSX_INFERENCE_TOKEN") or None
    headers = {"Content-Type": content_type, **({"Accept": accept} if accept else {})}
    server = Server(address, token, absent="see `tsx deploy status`")
    response = server.call("POST", path("predictions", model), body, headers)
    return Response.complete(response.body(), response.content_type)


def _name(container: Mapping[str, Any]) -> str:
    return str(container["Name"]).removeprefix("/")


def _address(container: Mapping[str, Any]) -> str:
    """Where this machine reaches it."""
    bindings = (container.get("HostConfig") or {}).get("PortBindings") or {}
    bound = (bindings.get(f"{INSIDE}/tcp") or [{}])[0]
    host = bound.get("HostIp") or "127.0.0.1"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{bound.get('HostPort', INSIDE)}"


def _time(text: object) -> datetime:
    """Docker writes nanoseconds, podman the machine's zone: what is behind the seconds is cut."""
    match = re.match(
        r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:\.\d+)?\s*(Z|[+-]\d\d:?\d\d)?", str(text)
    )
    if match is None:
        return datetime.fromtimestamp(0, timezone.utc)
    zone = (match[3] or "Z").replace("Z", "+00:00")
    return datetime.fromisoformat(
        f"{match[1]}T{match[2]}{zone if ':' in zone else f'{zone[:3]}:{zone[3:]}'}"
    )
