"""What Ray Serve shows of an application: which version it is, how it is, and where its replicas
are. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tsx_cli.deploy.engine.resources import State
from tsx_runtime.targets.ray.config import MODEL

# the key of the user_config that the deployer writes: version, tags, and of a canary the percentage
RELEASE = "release"


@dataclass(frozen=True)
class RunningApplication:
    shown: Mapping[str, Any]  # an `ApplicationDetails` of Ray Serve

    @property
    def _routing(self) -> Mapping[str, Any]:
        """Empty where tsx deploy did not make it."""
        configs = (
            each["deployment_config"].get("user_config")
            for each in self.shown["deployments"].values()
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
        """The percentage of its requests that its canary gets."""
        return float((self._routing.get("canary") or {}).get("percent", 0.0))

    @property
    def condition(self) -> tuple[State, str]:
        status = str(self.shown["status"])
        if status == "RUNNING":
            return "ready", ""
        return (
            "failed"
            if status
            in (
                "DEPLOY_FAILED",
                "UNHEALTHY",
            )
            else "changing"
        ), self.message or f"is {status.lower()}"

    @property
    def is_ending(self) -> bool:
        return str(self.shown["status"]) == "DELETING"

    @property
    def message(self) -> str:
        """Ray Serve's own words, the most precise ones first, or what its replicas wait for."""
        said = [last_line(each["message"]) for each in self.shown["deployments"].values()]
        for each in self.shown["deployments"].values():
            unplaced = [
                replica
                for replica in each["replicas"]
                if replica["state"] == "STARTING" and not replica.get("node_id")
            ]
            if unplaced:
                needs = ", ".join(
                    f"{amount:g} {resource}"
                    for resource, amount in each["required_resources"].items()
                )
                said.append(
                    f"{len(unplaced)} of its replicas ({needs or 'no resources'} each) have no"
                    " node yet"
                )
        return next((text for text in (*said, self.shown["message"]) if text), "")

    @property
    def replicas(self) -> list[Mapping[str, Any]]:
        """Those of the model; the ingress in front of them holds none."""
        return list(self._model.get("replicas", ()))

    @property
    def wanted(self) -> int:
        return int(self._model.get("target_num_replicas", 0))

    @property
    def _model(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.shown["deployments"].get(MODEL, {})
        return found

    def logs(self) -> dict[str, dict[str, list[str]]]:
        """By node, the log files of each replica, of those that died lately as well."""
        found: dict[str, dict[str, list[str]]] = {}
        for part in self.shown["deployments"].values():
            for each in (*part.get("recent_dead_replicas", ()), *part["replicas"]):
                if each.get("node_id") and each.get("worker_id"):
                    files = [
                        f"worker-{each['worker_id']}-*.{kind}" for kind in ("err", "out")
                    ]  # which Ray Serve's own lines go to as well
                    found.setdefault(str(each["node_id"]), {})[str(each["replica_id"])] = files
        return found


def last_line(text: str) -> str:
    """Of a traceback, what was raised; any other text as a whole."""
    return text.strip().splitlines()[-1].rstrip(".") if "\n  File " in text else text
