"""What Ray Serve reports about an application: its version, state and replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tsx_cli.deploy.engine.resources import State
from tsx_runtime.targets.ray.config import MODEL

# The key of the user_config with version and tags, and the percentage of a canary.
RELEASE = "release"


@dataclass(frozen=True)
class RunningApplication:
    shown: Mapping[str, Any]  # an `ApplicationDetails` of Ray Serve

    @property
    def _routing(self) -> Mapping[str, Any]:
        """The `user_config` of the ingress; empty if tsx did not deploy the application."""
        configs = (
            deployment["deployment_config"].get("user_config")
            for deployment in self.shown["deployments"].values()
        )
        return next(
            (config for config in configs if isinstance(config, Mapping) and config.get(RELEASE)),
            {},
        )

    @property
    def release(self) -> dict[str, Any]:
        return dict(self._routing.get(RELEASE, {}))

    @property
    def version(self) -> str | None:
        return self.release.get("version")

    @property
    def tags(self) -> dict[str, str]:
        return dict(self.release.get("tags") or {})

    @property
    def share(self) -> float:
        """The percentage of requests for the canary."""
        return float((self._routing.get("canary") or {}).get("percent", 0.0))

    @property
    def condition(self) -> tuple[State, str]:
        status = str(self.shown["status"])
        if status == "RUNNING":
            return "ready", ""
        return (
            "failed" if status in ("DEPLOY_FAILED", "UNHEALTHY") else "changing"
        ), self.message or f"is {status.lower()}"

    @property
    def is_ending(self) -> bool:
        return str(self.shown["status"]) == "DELETING"

    @property
    def message(self) -> str:
        """The message of Ray Serve, or what the replicas wait for."""
        messages = [
            last_line(deployment["message"]) for deployment in self.shown["deployments"].values()
        ]
        for deployment in self.shown["deployments"].values():
            unplaced = [
                replica
                for replica in deployment["replicas"]
                if replica["state"] == "STARTING" and not replica.get("node_id")
            ]
            if unplaced:
                needs = ", ".join(
                    f"{amount:g} {resource}"
                    for resource, amount in deployment["required_resources"].items()
                )
                messages.append(
                    f"{len(unplaced)} of its replicas ({needs or 'no resources'} each) have no"
                    " node yet"
                )
        return next((text for text in (*messages, self.shown["message"]) if text), "")

    @property
    def replicas(self) -> list[Mapping[str, Any]]:
        """The replicas of the model, without those of the ingress."""
        return list(self._model.get("replicas", ()))

    @property
    def wanted(self) -> int:
        return int(self._model.get("target_num_replicas", 0))

    @property
    def _model(self) -> Mapping[str, Any]:
        model: Mapping[str, Any] = self.shown["deployments"].get(MODEL, {})
        return model

    def logs(self) -> dict[str, dict[str, list[str]]]:
        """Return the log files of replicas by node, recently dead replicas included."""
        files_by_node: dict[str, dict[str, list[str]]] = {}
        for part in self.shown["deployments"].values():
            for replica in (*part.get("recent_dead_replicas", ()), *part["replicas"]):
                if replica.get("node_id") and replica.get("worker_id"):
                    # Ray Serve writes to these files as well.
                    files = [f"worker-{replica['worker_id']}-*.{kind}" for kind in ("err", "out")]
                    files_by_node.setdefault(str(replica["node_id"]), {})[
                        str(replica["replica_id"])
                    ] = files
        return files_by_node


def last_line(text: str) -> str:
    """Return the exception of a traceback, and other texts unchanged."""
    return text.strip().splitlines()[-1].rstrip(".") if "\n  File " in text else text
