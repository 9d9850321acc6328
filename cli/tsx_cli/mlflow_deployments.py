"""The target `tsx` of `mlflow deployments`: MLflow's models, deployed to a running server by its
management API.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

from mlflow.artifacts import download_artifacts
from mlflow.deployments import BaseDeploymentClient, PredictionsResponse
from mlflow.exceptions import MlflowException, get_error_code
from mlflow.protos.databricks_pb2 import (
    INVALID_PARAMETER_VALUE,
    RESOURCE_ALREADY_EXISTS,
    RESOURCE_DOES_NOT_EXIST,
)
from mlflow.utils.proto_json_utils import dump_input_data

from tsx_archiver import ArchiveError, Manifest, inspect_archive
from tsx_archiver.metadata.mlmodel import MANIFEST_KEY, PYFUNC, PYFUNC_FLAVOR
from tsx_archiver.storage.digest import content_digest
from tsx_archiver.storage.private_directory import temporary_directory
from tsx_cli.archive.model_file import HandlerFiles
from tsx_cli.archive.packing import Packing, pack
from tsx_cli.archive.source import classify
from tsx_cli.common.client import RequestFailed, Server, path, reading_answers
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.common.inputs import split_list
from tsx_cli.common.options import read_settings
from tsx_cli.models.command import all_models
from tsx_cli.models.traffic import read_weights, with_shares
from tsx_runtime.api.management.schemas import RegisterParameters, ScaleParameters
from tsx_runtime.errors import TsxError
from tsx_runtime.shared.suggestions import suggestion

TARGET = re.compile(r"tsx://(?P<host>[^/?#]+?)(:(?P<port>\d+))?/?")
Config: TypeAlias = "Mapping[str, Any] | None"
Text: TypeAlias = "str | None"
PACKING = (
    "VERSION",
    "HANDLER",
    "MODEL_FILE",
    "EXTRA_FILES",
    "REQUIREMENTS_FILE",
    "CONFIG_FILE",
    "EXPORT_PATH",
)
OWN = (
    "url",
    "model_name",
    "handler",
    "replace",
    "model_version",
)  # parameters of the management API that the target itself gives
DEFAULT = "set_default"
ENDPOINT = ("traffic", "default")
PROTOCOL = {"inputs", "instances", "dataframe_split", "dataframe_records"}
ERRORS = {400: INVALID_PARAMETER_VALUE, 404: RESOURCE_DOES_NOT_EXIST, 409: RESOURCE_ALREADY_EXISTS}
HELP = f"""Targets: tsx://HOST:PORT, with PORT for predictions (8080 if not given) and the next one for management; or tsx, for the settings
of tsx: TSX_INFERENCE_ADDRESS and TSX_MANAGEMENT_ADDRESS. TSX_INFERENCE_TOKEN and TSX_MANAGEMENT_TOKEN are sent to both.
A deployment NAME is a model, NAME/VERSION one of its versions; with --endpoint, that is the model, and NAME the version.
Config of create and update: {", ".join(PACKING)} (all but the last as for `tsx archive`;
EXPORT_PATH is the server's model_store as this machine sees it), and the parameters of POST /models, such as batch_size.
Config of update without a model: the parameters of PUT /models, and {DEFAULT}=true.
Config of update-endpoint: traffic=VERSION=PERCENT,VERSION=PERCENT and default=VERSION.
Config of run-local: the keys in capitals; all others are settings of the server, such as inference_address."""


@contextmanager
def _as_mlflow() -> Iterator[None]:
    try:
        yield
    except RequestFailed as error:
        raise MlflowException(
            error.message, error_code=ERRORS.get(error.status, get_error_code(error.status))
        ) from error
    except (CliError, ArchiveError, TsxError) as error:
        raise MlflowException(error.message, error_code=INVALID_PARAMETER_VALUE) from error
    except OSError as error:
        raise MlflowException(str(error)) from error


class TsxDeploymentClient(BaseDeploymentClient):  # type: ignore[misc]  # MLflow is typed in part, and not read
    """Errors are MlflowException, in the server's own words.

    An endpoint is a model, and its deployments are the model's versions.
    """

    @_as_mlflow()
    def __init__(self, target_uri: str) -> None:
        super().__init__(target_uri)
        self._settings, _ = read_settings(None, quiet=True)
        self._inference, self._management = self._server("inference"), self._server("management")

    @_as_mlflow()
    def create_deployment(
        self,
        name: str,
        model_uri: str,
        flavor: Text = None,
        config: Config = None,
        endpoint: Text = None,
    ) -> dict[str, str]:
        return {
            "name": name,
            "flavor": self._deploy(
                _place(name, endpoint), model_uri, flavor, config, replace=False
            ),
        }

    @_as_mlflow()
    def update_deployment(
        self,
        name: str,
        model_uri: Text = None,
        flavor: Text = None,
        config: Config = None,
        endpoint: Text = None,
    ) -> dict[str, str]:
        """With a model, it takes the place of the deployed one without losing a request; else the
        workers and limits change.
        """
        place = _place(name, endpoint)
        if model_uri is not None:
            return {
                "name": name,
                "flavor": self._deploy(place, model_uri, flavor, config, replace=True),
            }
        if flavor is not None:
            raise UsageError(f"the flavour {flavor} is of a new model: give --model-uri as well")
        given = _checked(config, (DEFAULT, *ScaleParameters.model_fields))
        is_default = str(given.pop(DEFAULT, False)).lower() == "true"
        if is_default and len(place) == 1:
            raise UsageError(f"{DEFAULT} is for one version: name it, as in {name}/2")
        if not given and not is_default:
            raise UsageError(
                "there is nothing to update: give --model-uri, or a limit such as -C batch_size=8"
            )
        if given:
            self._management.call("PUT", path("models", *place, **{"synchronous": True, **given}))
        if is_default:
            self._management.call("PUT", path("models", *place, "set-default"))
        return {"name": name, "flavor": "unchanged"}

    @_as_mlflow()
    def delete_deployment(self, name: str, config: Config = None, endpoint: Text = None) -> None:
        _checked(config, ())
        model, *version = _place(name, endpoint)
        if not version:
            self.delete_endpoint(model)
        elif self._versions(model, *version):
            self._management.call("DELETE", path("models", model, *version))

    @_as_mlflow()
    def list_deployments(self, endpoint: Text = None) -> list[dict[str, str]]:
        if endpoint is None:
            return self.list_endpoints()
        return [
            {"name": version, "endpoint": endpoint} for version in self._versions(endpoint, "all")
        ]

    @_as_mlflow()
    @reading_answers()
    def get_deployment(self, name: str, endpoint: Text = None) -> dict[str, Any]:
        return {
            "name": name,
            **self._management.call_json("GET", path("models", *_place(name, endpoint)), kind=list)[
                0
            ],
        }

    @_as_mlflow()
    def predict(
        self, deployment_name: Text = None, inputs: Any = None, endpoint: Text = None
    ) -> PredictionsResponse:
        """`inputs`: a DataFrame, an array, a list, arrays by name, or a request of MLflow's scoring
        protocol.
        """
        answer = self._ask("predictions", deployment_name, endpoint, inputs)
        return PredictionsResponse(
            answer
            if isinstance(answer, dict) and "predictions" in answer
            else {"predictions": answer}
        )

    @_as_mlflow()
    def explain(self, deployment_name: Text = None, df: Any = None, endpoint: Text = None) -> Any:
        """Of one row, as `predict` takes it."""
        return self._ask("explanations", deployment_name, endpoint, df)

    @_as_mlflow()
    def create_endpoint(self, name: str, config: Config = None) -> dict[str, str]:
        """Nothing is made before its first deployment: a model of the server has at least one
        version.
        """
        _checked(config, ())
        if self._versions(name):
            raise MlflowException(
                f"The endpoint {name} exists already.", error_code=RESOURCE_ALREADY_EXISTS
            )
        return {"name": name}

    @_as_mlflow()
    def update_endpoint(self, endpoint: str, config: Config = None) -> None:
        """`traffic`: shares in percent by deployment; `default`: the deployment that answers
        without them.
        """
        given = _checked(config, ENDPOINT)
        if default := given.get("default"):
            self._management.call("PUT", path("models", endpoint, str(default), "set-default"))
        if shares := given.get("traffic"):
            pairs = (
                [f"{word}={share}" for word, share in shares.items()]
                if isinstance(shares, Mapping)
                else split_list([shares])
            )
            target = path("models", endpoint, "traffic")
            weights = with_shares(read_weights(pairs), self._management.call_json("GET", target))
            self._management.call_json("PATCH", target, {"weights": weights})

    @_as_mlflow()
    def delete_endpoint(self, endpoint: str) -> None:
        default = self._versions(endpoint)
        for version in [
            *(each for each in self._versions(endpoint, "all") if each not in default),
            *default,
        ]:  # which goes last
            self._management.call("DELETE", path("models", endpoint, version))

    @_as_mlflow()
    @reading_answers()
    def list_endpoints(self) -> list[dict[str, str]]:
        return [{"name": each["modelName"]} for each in all_models(self._management)]

    @_as_mlflow()
    @reading_answers()
    def get_endpoint(self, endpoint: str) -> dict[str, Any]:
        found = self._management.call_json("GET", path("models", endpoint, "traffic"))
        return {
            "name": endpoint,
            "default": found["default"],
            "traffic": {each["version"]: each["share"] for each in found["table"]},
        }

    def _server(self, role: str) -> Server:
        url = address(self.target_uri, role) or getattr(self._settings, f"{role}_address")
        token = getattr(self._settings, f"{role}_token")
        return Server(
            url,
            token,
            role=role,
            certificate=self._settings.certificate_file,
            absent="start one with `tsx serve`",
        )

    def _ask(self, what: str, name: Text, endpoint: Text, inputs: Any) -> Any:
        """The answer as JSON, or as text."""
        if not name and not endpoint:
            raise UsageError("name the deployment or the endpoint that is to answer")
        if isinstance(inputs, Mapping):
            arrays = {key: _as_list(value) for key, value in inputs.items()}
            inputs = json.dumps(arrays if PROTOCOL & set(arrays) else {"inputs": arrays})
        target, body = (
            path(what, *(_place(name, endpoint) if name else [str(endpoint)])),
            dump_input_data(_as_list(inputs)).encode(),
        )
        answer = self._inference.call(
            "POST", target, body, {"Content-Type": "application/json"}
        ).body()
        try:
            return json.loads(answer)
        except (ValueError, RecursionError):
            return answer.decode(errors="replace")

    def _deploy(
        self, place: list[str], uri: str, flavor: Text, config: Config, *, replace: bool
    ) -> str:
        """The flavour of the model."""
        given = _checked(config, (*PACKING, *RegisterParameters.model_fields))
        store = given.get("EXPORT_PATH") or self._settings.model_store
        if store is None or not Path(store).is_dir():
            raise UsageError(
                f"there is no directory {store or ''} for the archive: -C EXPORT_PATH=DIR names the"
                " server's model_store"
            )
        model = place[0]
        with tempfile.TemporaryDirectory(prefix="tsx-mlflow-", dir=temporary_directory()) as made:
            archive, manifest, found = _packed(uri, place, flavor, given, Path(made))
            if not replace and self._versions(model, manifest.version):
                text = (
                    f"The deployment {model}/{manifest.version} exists already; update it, or"
                    " delete it first."
                )
                raise MlflowException(text, error_code=RESOURCE_ALREADY_EXISTS)
            with (
                archive.open("rb") as content
                # named by it: a server that reads another store finds nothing, rather than an old
                # file
            ):
                file = (
                    Path(store) / f"{model}-{manifest.version}-{content_digest(content)[:12]}.mar"
                )
            is_new = not file.exists()
            if is_new:
                shutil.move(archive, file)
        parameters = {
            "synchronous": True,
            "replace": replace,
            "initial_workers": None if replace else 1,
        }
        parameters |= {key: value for key, value in given.items() if key not in PACKING}
        try:
            self._management.call(
                "POST", path("models", url=file.name, model_name=model, **parameters)
            )
        except RequestFailed as error:
            if is_new:
                file.unlink()
            if error.status != 404:
                raise
            raise error.hinted(
                f"the server does not read {store}: -C EXPORT_PATH=DIR names its model_store"
            ) from error
        return found

    @reading_answers()
    def _versions(self, *place: str) -> list[str]:
        """Of a model: its default one, one that is named, or `all`; empty where it does not
        exist.
        """
        try:
            return [
                each["modelVersion"]
                for each in self._management.call_json("GET", path("models", *place), kind=list)
            ]
        except RequestFailed as error:
            if error.status == 404:
                return []
            raise


def run_local(name: str, model_uri: str, flavor: Text = None, config: Config = None) -> None:
    """Serves the model by a server of its own until it is interrupted; what is no key of an archive
    is a setting of the server.
    """
    given = {
        key.upper() if key.upper() in PACKING else key: value
        for key, value in (config or {}).items()
    }
    settings = [
        part
        for key, value in given.items()
        if key not in PACKING
        for part in ("--set", f"{key}={value}")
    ]
    with (
        _as_mlflow(),
        tempfile.TemporaryDirectory(prefix="tsx-mlflow-", dir=temporary_directory()) as made,
    ):
        archive, _, _ = _packed(model_uri, _place(name, None), flavor, given, Path(made))
        with subprocess.Popen(
            [sys.executable, "-m", "tsx_cli", "serve", str(archive), *settings]
        ) as server:
            try:
                code = server.wait()
            except (
                KeyboardInterrupt
            ):  # Ctrl-C reaches the server as well: it answers what it has, and stops
                server.wait()
                return
        if code:
            raise CliError(f"the server ended with status {code}; its own output says more")


def target_help() -> str:
    return HELP


def address(target: str, role: str) -> str | None:
    """Of a target URI; None where the settings have it. Raises UsageError."""
    if target.rstrip(":/") == "tsx":
        return None
    if not (found := TARGET.fullmatch(target)):
        raise UsageError(
            f"'{target}' is not a target; one looks like tsx://HOST:PORT, or tsx for the addresses"
            " of the settings"
        )
    return f"http://{found['host']}:{int(found['port'] or 8080) + (role == 'management')}"


def _place(name: str, endpoint: Text) -> list[str]:
    """The model that a deployment is on the server, and its version, if it is one."""
    return [endpoint, name] if endpoint else name.split("/", 1)


def _as_list(value: Any) -> Any:
    """An array of numpy or torch as JSON has it."""
    return value.tolist() if hasattr(value, "tolist") else value


def _packed(
    uri: str, place: list[str], flavor: Text, given: Mapping[str, Any], directory: Path
) -> tuple[Path, Manifest, str]:
    """The archive of a model, its manifest and its flavour.

    Raises CliError, ArchiveError and MlflowException.
    """
    if "://" in uri or uri.startswith("file:"):
        uri = download_artifacts(uri, dst_path=str(directory))
    named = place[1] if len(place) > 1 else None
    version = given.get("VERSION", named)
    if named not in (None, version):
        raise UsageError(
            f"VERSION={version} is not the version {named} of the deployment; leave it out"
        )
    handler = given.get("HANDLER") or (PYFUNC if flavor == PYFUNC_FLAVOR else None)
    model_file, requirements, settings = (
        Path(given[key]) if key in given else None
        for key in ("MODEL_FILE", "REQUIREMENTS_FILE", "CONFIG_FILE")
    )
    parts = HandlerFiles(handler, model_file, split_list([given.get("EXTRA_FILES", "")]))
    order = Packing(
        parts,
        place[0],
        version,
        requirements,
        settings,
        directory,
        "default",
        force=True,
        samples=(),
        import_it=False,
    )
    archive = Path(pack(Path(uri), classify(Path(uri)), order, quiet=True).archive)
    manifest = inspect_archive(archive).manifest
    own = str(manifest.data.get(MANIFEST_KEY, {}).get("flavor", "pytorch"))
    if flavor not in (None, own, PYFUNC_FLAVOR):
        raise UsageError(f"{uri} has the flavour {own}, not {flavor}; leave --flavor out")
    return archive, manifest, own


def _checked(config: Config, known: Collection[str]) -> dict[str, Any]:
    """The keys in their own spelling. Raises UsageError."""
    spelled = {name.lower(): name for name in known if name not in OWN}
    found = {key.lower().replace("-", "_"): value for key, value in (config or {}).items()}
    for key in found:
        if key not in spelled:
            raise UsageError(
                f"the config {key} is not"
                f" known{suggestion(key, spelled) or '; `mlflow deployments help -t tsx` lists all'}"
            )
    return {spelled[key]: value for key, value in found.items()}
