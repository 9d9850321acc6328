"""A Ray cluster: the applications of Ray Serve, the records of versions, and tasks on the nodes.

The records are in the cluster's key-value store.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import socket
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.experimental.internal_kv import (
    _internal_kv_del,
    _internal_kv_get,
    _internal_kv_list,
    _internal_kv_put,
)
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tsx_cli.common.failure import CliError
from tsx_cli.deploy.aws.session import Cloud
from tsx_cli.deploy.engine.kind import CloudError
from tsx_cli.deploy.engine.resources import OWNER
from tsx_cli.deploy.ray.resources import GRPC
from tsx_cli.deploy.ray.running import RunningApplication, last_line
from tsx_cli.deploy.ray.spec import Ray
from tsx_runtime.errors import TsxError
from tsx_runtime.targets.ray.config import NAMESPACE

CONNECT_TIMEOUT_S, RESPONSE_TIMEOUT_S = 5.0, 60.0
RECORDS = "deployments/"  # prefix of the keys NAME/NAME-DIGEST of records
CLIENT_PORT = 10001


@dataclass(frozen=True)
class RayCluster:
    settings: Ray
    account: Callable[[], Cloud]  # the AWS account, if archives go to S3

    @property
    def region(self) -> str:
        return f"the Ray cluster {self.settings.address}"

    @cached_property
    def aws(self) -> Cloud:
        return self.account()

    def connect(self) -> None:
        """Connect to the cluster once.

        Raises:
            CliError: The cluster does not answer, or refuses this machine.
        """
        if not ray.is_initialized():
            connect(self.settings.address)

    def details(self) -> dict[str, Any]:
        """Return the content of the dashboard's `GET /api/serve/applications/`.

        The result is empty if Ray Serve does not run.

        Raises:
            CliError: The cluster cannot be reached.
        """
        self.connect()
        try:
            controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
        except ValueError:
            return {}
        with self.translate_errors("asking Ray Serve what it runs"):
            details = ray.get(
                controller.get_serve_instance_details.remote(), timeout=RESPONSE_TIMEOUT_S
            )
        result: dict[str, Any] = json.loads(json.dumps(details))  # enums become their values
        return result

    def application(self, name: str) -> RunningApplication | None:
        details = self.details().get("applications", {}).get(name)
        return None if details is None else RunningApplication(details)

    def find_owned(self, application: str, name: str) -> RunningApplication | None:
        """Return an application if it belongs to the deployment of this name."""
        running = self.application(application)
        return running if running is not None and running.tags.get(OWNER) == name else None

    def nodes(self) -> list[dict[str, float]]:
        """Return the total resources of each node."""
        self.connect()
        return [node["Resources"] for node in ray.nodes() if node["Alive"]]

    def start(self) -> None:
        """Start Ray Serve if it does not run.

        Raises:
            CliError: Ray Serve runs without gRPC, and the settings need it.
        """
        running = self.details()
        if not running:
            grpc = (
                {"grpc_options": {"grpc_servicer_functions": [GRPC]}} if self.settings.grpc else {}
            )
            with self.translate_errors("starting Ray Serve"):
                serve.start(
                    proxy_location="EveryNode",
                    http_options={"host": self.settings.host, "port": self.settings.port},
                    **grpc,
                )
        elif self.settings.grpc and GRPC not in (
            running["grpc_options"].get("grpc_servicer_functions") or ()
        ):
            raise CliError(
                f"Ray Serve runs on {self.region} without gRPC, which is chosen when it starts:"
                " remove ray.grpc, or start it again (`serve shutdown` ends all applications) with"
                f" the grpc_servicer_functions {GRPC}"
            )

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        doing: str,
        node: str | None = None,
        env: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run a function on a node of the cluster.

        Raises:
            CliError: The function or the cluster failed.
        """
        self.connect()
        options: dict[str, Any] = {
            "num_cpus": 0,
            "max_retries": 0,
            **({"runtime_env": dict(env)} if env else {}),
        }
        if node is not None:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=False)
        with self.translate_errors(doing):
            return ray.get(ray.remote(function).options(**options).remote(*arguments))

    def delete(self, name: str) -> None:
        self.connect()
        with self.translate_errors(f"removing {name}"):
            serve.delete(name)

    def record(self, version: str) -> dict[str, Any] | None:
        self.connect()
        content = _internal_kv_get(_key(version), namespace=NAMESPACE)
        result: dict[str, Any] | None = None if content is None else json.loads(content)
        return result

    def records(self, name: str = "") -> dict[str, dict[str, Any]]:
        """Return the records of one or all deployments by their versions, oldest first."""
        self.connect()
        keys = [
            key.decode()
            for key in _internal_kv_list(
                f"{RECORDS}{name}/" if name else RECORDS, namespace=NAMESPACE
            )
        ]
        records_by_version = {
            version: record
            for key in keys
            if (record := self.record(version := key.rpartition("/")[2])) is not None
        }
        return dict(sorted(records_by_version.items(), key=lambda item: str(item[1]["made"])))

    def put_record(self, version: str, record: Mapping[str, Any]) -> None:
        self.connect()
        _internal_kv_put(_key(version), json.dumps(record), namespace=NAMESPACE)

    def delete_record(self, version: str) -> None:
        self.connect()
        _internal_kv_del(_key(version), namespace=NAMESPACE)

    @contextlib.contextmanager
    def translate_errors(self, doing: str) -> Generator[None, None, None]:
        try:
            yield
        except RayTaskError as error:
            if isinstance(error.cause, CliError | TsxError):
                raise CloudError(error.cause.message) from error
            is_tsx_missing = isinstance(error.cause, ModuleNotFoundError)
            advice = (
                " Its nodes need tsx: install tsx-serve[ray] there, or set ray.runtime_env={pip ="
                " ['tsx-serve[ray]']}"
                if is_tsx_missing
                else ""
            )
            raise CloudError(f"{doing}: {last_line(str(error))}.{advice}") from error
        except (RayError, TimeoutError) as error:
            raise CloudError(
                f"{doing}: {_first_sentence(error)}; `ray status` shows the cluster's nodes"
            ) from error


def connect(address: str) -> None:
    """Connect to the cluster at an address.

    Raises:
        CliError: The cluster does not answer, or refuses this machine.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if host:  # A check of the port fails early; Ray would retry for minutes.
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
        ray.init(
            address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR
        )
        # tsx itself prints what Ray Serve would log at lower levels.
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
    except (OSError, OverflowError) as error:  # OverflowError: the port is too large
        raise CliError(
            f"no Ray cluster answers at {address}: {error}. {_advice(address)}"
        ) from error
    except (RuntimeError, ValueError, AssertionError, RayError) as error:
        raise CliError(
            f"the Ray cluster {address} refuses this machine: {_first_sentence(error)}."
            f" {_advice(address, str(error))}"
        ) from error


def _key(version: str) -> str:
    return f"{RECORDS}{version.rpartition('-')[0]}/{version}"


def _advice(address: str, text: str = "") -> str:
    if "ersion" in text:
        return "Run tsx with the same versions of Python and Ray as the cluster's nodes have"
    if address == "auto":
        return (
            "auto is for the cluster's nodes; elsewhere the address is ray://HOST:10001. `ray start"
            " --head` starts a cluster here"
        )
    if address.startswith("ray://"):
        return (
            "Start its head node with `ray start --head` (a Ray client is answered on port"
            f" {CLIENT_PORT}), and let this machine reach it"
        )
    return (
        f"HOST:PORT is for the cluster's nodes; elsewhere the address is ray://HOST:{CLIENT_PORT}"
    )


def _first_sentence(error: BaseException) -> str:
    return re.sub(r"\s+", " ", str(error)).strip().partition(". ")[0].rstrip(".")
