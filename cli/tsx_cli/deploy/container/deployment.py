"""A deployment on this machine: its containers, only one of which runs, and its responses."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from tsx_cli.common.client import Response, Server, path
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.deploy.container.kinds import ContainerHost, ending_of, health_of, labels_of, tags_of
from tsx_cli.deploy.container.resources import (
    CONTAINER_PORT,
    OPEN_VARIABLE,
    required_tokens,
    run_arguments,
)
from tsx_cli.deploy.engine.facts import Facts
from tsx_cli.deploy.engine.facts import tags_of as tags_of_spec
from tsx_cli.deploy.engine.kind import CloudError
from tsx_cli.deploy.engine.platform import DeployedVersion
from tsx_cli.deploy.engine.resources import Resource, digest, numbered_resources
from tsx_cli.deploy.spec import DeploySpec

KIND, IMAGE = "Tsx::Container::Container", "Tsx::Container::Image"
BUILT_IMAGE = "tsx.built"  # label of a container that names the image built for it


class ContainerPlatform:
    def wanted_resources(
        self, cloud: ContainerHost, spec: DeploySpec, facts: Facts
    ) -> list[Resource]:
        """Return the container.

        Raises:
            UsageError: Other machines can reach the container, and its tokens are not set.
        """
        missing_variables = [name for name in required_tokens(spec) if not os.environ.get(name)]
        if missing_variables:
            raise UsageError(
                f"container.host is {spec.container.host}, which other machines can reach: set"
                f" {' and '.join(missing_variables)} in this command's environment, or"
                f" env.{OPEN_VARIABLE}=true to"
                " serve without"
            )
        image = str(facts.image)
        tags = tags_of_spec(spec, facts)
        labels = {**tags, **({BUILT_IMAGE: image} if spec.image is None else {})}
        hashed_labels = {key: value for key, value in labels.items() if key != "tsx:spec-sha"}
        name = (
            f"tsx-{spec.name}-{digest(run_arguments(spec, image, name='', labels=hashed_labels))}"
        )
        properties = {
            "Running": True,
            "Words": run_arguments(spec, image, name=name, labels=labels),
            "Gpus": spec.container.gpus,
            "Patience": spec.container.startup_timeout,
            "Deployment": spec.name,
            "Image": image,
        }
        return [Resource("Container", KIND, name, properties, ("Image",), tags)]

    def existing_resources(
        self, cloud: ContainerHost, name: str, *, purge: bool = False
    ) -> list[Resource]:
        containers = cloud.containers(name)
        existing = numbered_resources("Container", KIND, map(_name, containers), ("Images",))
        if purge:
            images = sorted(
                {
                    *cloud.images(name),
                    *(
                        labels_of(container)[BUILT_IMAGE]
                        for container in containers
                        if BUILT_IMAGE in labels_of(container)
                    ),
                }
            )
            existing = numbered_resources("Image", IMAGE, images) + existing
        return existing

    def obsolete_resources(
        self, cloud: ContainerHost, spec: DeploySpec, wanted: Sequence[Resource]
    ) -> list[Resource]:
        names = {resource.name for resource in wanted}
        other_containers = [
            resource
            for resource in self.existing_resources(cloud, spec.name)
            if resource.name not in names
        ]
        return other_containers[: -(spec.keep - 1) or None]

    def versions(self, cloud: ContainerHost, name: str) -> list[DeployedVersion]:
        return [
            DeployedVersion(
                number,
                _name(container),
                _parse_time(container["Created"]),
                tags_of(container),
                bool(container["State"].get("Running")),
            )
            for number, container in enumerate(cloud.containers(name), start=1)
        ]

    def rollback_resources(
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

    def promotion_resources(self, cloud: ContainerHost, name: str) -> list[Resource]:
        raise CliError(
            "a container deployment has no canary to promote: only one container runs at a time"
        )

    def status(self, cloud: ContainerHost, name: str) -> dict[str, Any] | None:
        containers = cloud.containers(name)
        if not containers:
            return None
        current = _current(containers)
        current = cloud.container(_name(current)) or current
        state, tags = current["State"], tags_of(current)
        has_ended = not state.get("Running") and state.get("Status") not in ("paused", "created")
        return {
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
        containers = [
            container for container in cloud.containers(name) if container["State"].get("Running")
        ]
        if not containers:
            raise CloudError(f"{name} does not run; see `tsx deploy status`")
        model = tags_of(containers[0]).get("tsx:model", name).partition("/")[0]
        return predict(_address(containers[0]), model, body, content_type, accept)

    def logs(
        self, cloud: ContainerHost, name: str, *, lines: int, since: str | None, follow: bool
    ) -> Iterator[str]:
        """Yield the log lines of the running container, or of the newest if none runs.

        Raises:
            CliError: There is no such deployment.
        """
        containers = cloud.containers(name)
        if not containers:
            raise CliError(f"there is no deployment '{name}' on {cloud.region}")
        arguments = log_arguments(lines, since, follow=follow)
        return cloud.program.lines("logs", *arguments, _name(_current(containers)))


def log_arguments(lines: int, since: str | None, *, follow: bool) -> list[str]:
    """Return arguments of `logs`, for docker, podman and kubectl."""
    options = [*(["--since", since] if since else []), *(["--follow"] if follow else [])]
    return ["--tail", str(lines), *options]


def predict(
    address: str,
    model: str,
    body: bytes,
    content_type: str,
    accept: str | None,
    token: str | None = None,
) -> Response:
    """Send a request, and read the whole response.

    The environment variable TSX_INFERENCE_TOKEN has the default token.

    Raises:
        CliError: The server does not answer, or answers with an error.
    """
    token = token or os.environ.get("TSX_INFERENCE_TOKEN") or None
    headers = {"Content-Type": content_type, **({"Accept": accept} if accept else {})}
    server = Server(address, token, absent="see `tsx deploy status`")
    response = server.call("POST", path("predictions", model), body, headers)
    return Response.complete(response.body(), response.content_type)


def _current(containers: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the running container, or the newest if none runs."""
    running = (container for container in containers if container["State"].get("Running"))
    return next(running, containers[-1])


def _name(container: Mapping[str, Any]) -> str:
    return str(container["Name"]).removeprefix("/")


def _address(container: Mapping[str, Any]) -> str:
    """Return the address of a container on this machine."""
    bindings = (container.get("HostConfig") or {}).get("PortBindings") or {}
    binding = (bindings.get(f"{CONTAINER_PORT}/tcp") or [{}])[0]
    host = binding.get("HostIp") or "127.0.0.1"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return (
        f"http://{f'[{host}]' if ':' in host else host}:{binding.get('HostPort', CONTAINER_PORT)}"
    )


def _parse_time(text: object) -> datetime:
    """Parse a time of docker (with nanoseconds) or podman (with a zone), and drop fractions."""
    match = re.match(
        r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:\.\d+)?\s*(Z|[+-]\d\d:?\d\d)?", str(text)
    )
    if match is None:
        return datetime.fromtimestamp(0, timezone.utc)
    zone = (match[3] or "Z").replace("Z", "+00:00")
    return datetime.fromisoformat(
        f"{match[1]}T{match[2]}{zone if ':' in zone else f'{zone[:3]}:{zone[3:]}'}"
    )
