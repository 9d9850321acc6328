"""An application as Ray Serve reports it: its version, state and replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tsx_cli.deploy.engine.resources import State
from tsx_runtime.targets.ray.config import MODEL

# The key of the user_config for the version, its tags, and the percentage of a canary.
RELEASE = "release"


@dataclass(frozen=True)
class RunningApplication:
    details: Mapping[str, Any]  # Ray Serve's `ApplicationDetails` as JSON

    @property
    def _routing(self) -> Mapping[str, Any]:
        """The `user_config` of the ingress; empty if tsx did not deploy the application."""
        configs = (
            deployment["deployment_config"].get("user_config")
            for deployment in self.details["deployments"].values()
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
    def canary_percent(self) -> float:
        """The percentage of requests for the canary."""
        return float((self._routing.get("canary") or {}).get("percent", 0.0))

    @property
    def condition(self) -> tuple[State, str]:
        status = str(self.details["status"])
        if status == "RUNNING":
            return "ready", ""
        return (
            "failed" if status in ("DEPLOY_FAILED", "UNHEALTHY") else "changing"
        ), self.message or f"is {status.lower()}"

    @property
    def is_ending(self) -> bool:
        return str(self.details["status"]) == "DELETING"

    @property
    def message(self) -> str:
        """The message of Ray Serve, or the reason why replicas wait."""
        messages = [
            last_line(deployment["message"]) for deployment in self.details["deployments"].values()
        ]
        for deployment in self.details["deployments"].values():
            waiting_replicas = [
                replica
                for replica in deployment["replicas"]
                if replica["state"] == "STARTING" and not replica.get("node_id")
            ]
            if waiting_replicas:
                needs = ", ".join(
                    f"{amount:g} {resource}"
                    for resource, amount in deployment["required_resources"].items()
                )
                messages.append(
                    f"{len(waiting_replicas)} of its replicas ({needs or 'no resources'} each) have"
                    " no node yet"
                )
        return next((text for text in (*messages, self.details["message"]) if text), "")

    @property
    def replicas(self) -> list[Mapping[str, Any]]:
        """The replicas of the model, without those of the ingress."""
        return list(self._model.get("replicas", ()))

    @property
    def target_replicas(self) -> int:
        return int(self._model.get("target_num_replicas", 0))

    @property
    def _model(self) -> Mapping[str, Any]:
        model: Mapping[str, Any] = self.details["deployments"].get(MODEL, {})
        return model

    def logs(self) -> dict[str, dict[str, list[str]]]:
        """Return the log files of replicas by node, recently dead replicas included."""
        files_by_node: dict[str, dict[str, list[str]]] = {}
        for deployment in self.details["deployments"].values():
            for replica in (*deployment.get("recent_dead_replicas", ()), *deployment["replicas"]):
                if replica.get("node_id") and replica.get("worker_id"):
                    # The log lines of Ray Serve are also in these files.
                    files = [f"worker-{replica['worker_id']}-*.{kind}" for kind in ("err", "out")]
                    files_by_node.setdefault(str(replica["node_id"]), {})[
                        str(replica["replica_id"])
                    ] = files
        return files_by_node


def last_line(text: str) -> str:
    """Return the exception of a traceback, and other texts unchanged."""
    return text.strip().splitlines()[-1].rstrip(".") if "\n  File " in text else text
