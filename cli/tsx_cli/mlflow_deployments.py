"""The target `tsx` of `mlflow deployments`, which deploys MLflow models to a running server."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
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
from tsx_archiver.storage.private_directory import scratch_directory
from tsx_cli.archive.model_file import HandlerFiles
from tsx_cli.archive.packing import PackingOptions, pack
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

TARGET_URI = re.compile(r"tsx://(?P<host>[^/?#]+?)(:(?P<port>\d+))?/?")
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
# Parameters of the management API that this module sets itself.
RESERVED_PARAMETERS = ("url", "model_name", "handler", "replace", "model_version")
DEFAULT_KEY = "set_default"
ENDPOINT_KEYS = ("traffic", "default")
PROTOCOL_KEYS = {"inputs", "instances", "dataframe_split", "dataframe_records"}
ERRORS = {400: INVALID_PARAMETER_VALUE, 404: RESOURCE_DOES_NOT_EXIST, 409: RESOURCE_ALREADY_EXISTS}
HELP = f"""Targets: tsx://HOST:PORT, with PORT for predictions (8080 if not given) and the next one for management; or tsx, for the settings
of tsx: TSX_INFERENCE_ADDRESS and TSX_MANAGEMENT_ADDRESS. TSX_INFERENCE_TOKEN and TSX_MANAGEMENT_TOKEN are sent to both.
A deployment NAME is a model, NAME/VERSION one of its versions; with --endpoint, that is the model, and NAME the version.
Config of create and update: {", ".join(PACKING)} (all but the last as for `tsx archive`;
EXPORT_PATH is the server's model_store as this machine sees it), and the parameters of POST /models, such as batch_size.
Config of update without a model: the parameters of PUT /models, and {DEFAULT_KEY}=true.
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


class TsxDeploymentClient(BaseDeploymentClient):  # type: ignore[misc]  # mypy does not read MLflow's incomplete types
    """A client of a running server; its errors are MlflowException.

    An endpoint is a model, and its deployments are the versions of the model.
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
                _model_and_version(name, endpoint), model_uri, flavor, config, replace=False
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
        """Replace the model of a deployment without losing a request, or change its limits."""
        names = _model_and_version(name, endpoint)
        if model_uri is not None:
            return {
                "name": name,
                "flavor": self._deploy(names, model_uri, flavor, config, replace=True),
            }
        if flavor is not None:
            raise UsageError(f"the flavour {flavor} is of a new model: give --model-uri as well")
        options = _check_config(config, (DEFAULT_KEY, *ScaleParameters.model_fields))
        is_default = str(options.pop(DEFAULT_KEY, False)).lower() == "true"
        if is_default and len(names) == 1:
            raise UsageError(f"{DEFAULT_KEY} is for one version: name it, as in {name}/2")
        if not options and not is_default:
            raise UsageError(
                "there is nothing to update: give --model-uri, or a limit such as -C batch_size=8"
            )
        if options:
            self._management.call("PUT", path("models", *names, **{"synchronous": True, **options}))
        if is_default:
            self._management.call("PUT", path("models", *names, "set-default"))
        return {"name": name, "flavor": "unchanged"}

    @_as_mlflow()
    def delete_deployment(self, name: str, config: Config = None, endpoint: Text = None) -> None:
        _check_config(config, ())
        model, *version = _model_and_version(name, endpoint)
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
            **self._management.call_json(
                "GET", path("models", *_model_and_version(name, endpoint)), kind=list
            )[0],
        }

    @_as_mlflow()
    def predict(
        self, deployment_name: Text = None, inputs: Any = None, endpoint: Text = None
    ) -> PredictionsResponse:
        """Send inputs, and return the predictions.

        Args:
            deployment_name: The model, or the model and its version.
            inputs: A DataFrame, an array, a list, arrays by name, or a request of MLflow's scoring
                protocol.
            endpoint: The model, if `deployment_name` is a version.
        """
        answer = self._ask("predictions", deployment_name, endpoint, inputs)
        return PredictionsResponse(
            answer
            if isinstance(answer, dict) and "predictions" in answer
            else {"predictions": answer}
        )

    @_as_mlflow()
    def explain(self, deployment_name: Text = None, df: Any = None, endpoint: Text = None) -> Any:
        """Explain the prediction for one row; it takes the same forms as `predict`."""
        return self._ask("explanations", deployment_name, endpoint, df)

    @_as_mlflow()
    def create_endpoint(self, name: str, config: Config = None) -> dict[str, str]:
        """Check that the name is free; the first deployment creates the model."""
        _check_config(config, ())
        if self._versions(name):
            raise MlflowException(
                f"The endpoint {name} exists already.", error_code=RESOURCE_ALREADY_EXISTS
            )
        return {"name": name}

    @_as_mlflow()
    def update_endpoint(self, endpoint: str, config: Config = None) -> None:
        """Change the traffic of a model.

        Args:
            endpoint: The model.
            config: `traffic`, percentages by version, and `default`, the default version.
        """
        options = _check_config(config, ENDPOINT_KEYS)
        if default := options.get("default"):
            self._management.call("PUT", path("models", endpoint, str(default), "set-default"))
        if shares := options.get("traffic"):
            pairs = (
                [f"{version}={share}" for version, share in shares.items()]
                if isinstance(shares, Mapping)
                else split_list([shares])
            )
            target = path("models", endpoint, "traffic")
            weights = with_shares(read_weights(pairs), self._management.call_json("GET", target))
            self._management.call_json("PATCH", target, {"weights": weights})

    @_as_mlflow()
    def delete_endpoint(self, endpoint: str) -> None:
        default = self._versions(endpoint)
        # The default version must be deleted last.
        for version in [
            *(version for version in self._versions(endpoint, "all") if version not in default),
            *default,
        ]:
            self._management.call("DELETE", path("models", endpoint, version))

    @_as_mlflow()
    @reading_answers()
    def list_endpoints(self) -> list[dict[str, str]]:
        return [{"name": model["modelName"]} for model in all_models(self._management)]

    @_as_mlflow()
    @reading_answers()
    def get_endpoint(self, endpoint: str) -> dict[str, Any]:
        traffic = self._management.call_json("GET", path("models", endpoint, "traffic"))
        return {
            "name": endpoint,
            "default": traffic["default"],
            "traffic": {share["version"]: share["share"] for share in traffic["table"]},
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

    def _ask(self, verb: str, name: Text, endpoint: Text, inputs: Any) -> Any:
        """Send inputs, and return the response as JSON or text."""
        if not name and not endpoint:
            raise UsageError("name the deployment or the endpoint that is to answer")
        if isinstance(inputs, Mapping):
            arrays = {key: _as_list(value) for key, value in inputs.items()}
            inputs = json.dumps(arrays if PROTOCOL_KEYS & set(arrays) else {"inputs": arrays})
        target, body = (
            path(verb, *(_model_and_version(name, endpoint) if name else [str(endpoint)])),
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
        self, names: list[str], uri: str, flavor: Text, config: Config, *, replace: bool
    ) -> str:
        """Pack and register a model, and return its flavour."""
        options = _check_config(config, (*PACKING, *RegisterParameters.model_fields))
        store = options.get("EXPORT_PATH") or self._settings.model_store
        if store is None or not Path(store).is_dir():
            raise UsageError(
                f"there is no directory {store or ''} for the archive: -C EXPORT_PATH=DIR names the"
                " server's model_store"
            )
        model = names[0]
        with scratch_directory("tsx-mlflow-") as directory:
            archive, manifest, model_flavor = _pack_model(uri, names, flavor, options, directory)
            if not replace and self._versions(model, manifest.version):
                text = (
                    f"The deployment {model}/{manifest.version} exists already; update it, or"
                    " delete it first."
                )
                raise MlflowException(text, error_code=RESOURCE_ALREADY_EXISTS)
            # The file is named after its content. If the server reads another store, it therefore
            # finds no file, instead of an old one.
            with archive.open("rb") as content:
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
        parameters |= {key: value for key, value in options.items() if key not in PACKING}
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
        return model_flavor

    @reading_answers()
    def _versions(self, *names: str) -> list[str]:
        """Return the default version, a given one, or `all`; empty if the model does not exist."""
        try:
            return [
                version["modelVersion"]
                for version in self._management.call_json("GET", path("models", *names), kind=list)
            ]
        except RequestFailed as error:
            if error.status == 404:
                return []
            raise


def run_local(name: str, model_uri: str, flavor: Text = None, config: Config = None) -> None:
    """Serve a model by a new server until it is interrupted.

    Keys of `config` that do not belong to the archive are settings of the server.
    """
    options = {
        key.upper() if key.upper() in PACKING else key: value
        for key, value in (config or {}).items()
    }
    settings = [
        part
        for key, value in options.items()
        if key not in PACKING
        for part in ("--set", f"{key}={value}")
    ]
    with _as_mlflow(), scratch_directory("tsx-mlflow-") as directory:
        archive, _, _ = _pack_model(
            model_uri, _model_and_version(name, None), flavor, options, directory
        )
        with subprocess.Popen(
            [sys.executable, "-m", "tsx_cli", "serve", str(archive), *settings]
        ) as server:
            try:
                code = server.wait()
            except KeyboardInterrupt:
                # The server receives Ctrl-C too, and still answers the accepted requests.
                server.wait()
                return
        if code:
            raise CliError(f"the server ended with status {code}; its own output says more")


def target_help() -> str:
    return HELP


def address(target: str, role: str) -> str | None:
    """Return the address of a target URI, or None for the address of the settings.

    Raises:
        UsageError: The URI is invalid.
    """
    if target.rstrip(":/") == "tsx":
        return None
    if not (match := TARGET_URI.fullmatch(target)):
        raise UsageError(
            f"'{target}' is not a target; one looks like tsx://HOST:PORT, or tsx for the addresses"
            " of the settings"
        )
    return f"http://{match['host']}:{int(match['port'] or 8080) + (role == 'management')}"


def _model_and_version(name: str, endpoint: Text) -> list[str]:
    """Return the model of a deployment, and the version if the name contains one."""
    return [endpoint, name] if endpoint else name.split("/", 1)


def _as_list(value: Any) -> Any:
    """Convert an array of numpy or torch to nested lists."""
    return value.tolist() if hasattr(value, "tolist") else value


def _pack_model(
    uri: str, names: list[str], flavor: Text, options: Mapping[str, Any], directory: Path
) -> tuple[Path, Manifest, str]:
    """Pack a model, and return the archive, its manifest and its flavour."""
    if "://" in uri or uri.startswith("file:"):
        uri = download_artifacts(uri, dst_path=str(directory))
    given_version = names[1] if len(names) > 1 else None
    version = options.get("VERSION", given_version)
    if given_version not in (None, version):
        raise UsageError(
            f"VERSION={version} is not the version {given_version} of the deployment; leave it out"
        )
    handler = options.get("HANDLER") or (PYFUNC if flavor == PYFUNC_FLAVOR else None)
    model_file, requirements, settings = (
        Path(options[key]) if key in options else None
        for key in ("MODEL_FILE", "REQUIREMENTS_FILE", "CONFIG_FILE")
    )
    parts = HandlerFiles(handler, model_file, split_list([options.get("EXTRA_FILES", "")]))
    packing_options = PackingOptions(
        parts,
        names[0],
        version,
        requirements,
        settings,
        directory,
        "default",
        force=True,
        samples=(),
        test_import=False,
    )
    archive = Path(pack(Path(uri), classify(Path(uri)), packing_options, quiet=True).archive)
    manifest = inspect_archive(archive).manifest
    model_flavor = str(manifest.data.get(MANIFEST_KEY, {}).get("flavor", "pytorch"))
    if flavor not in (None, model_flavor, PYFUNC_FLAVOR):
        raise UsageError(f"{uri} has the flavour {model_flavor}, not {flavor}; leave --flavor out")
    return archive, manifest, model_flavor


def _check_config(config: Config, known_names: Collection[str]) -> dict[str, Any]:
    """Return a config whose keys have their usual case.

    Raises:
        UsageError: A key is unknown.
    """
    names_by_lower = {name.lower(): name for name in known_names if name not in RESERVED_PARAMETERS}
    keys = {key.lower().replace("-", "_"): value for key, value in (config or {}).items()}
    for key in keys:
        if key not in names_by_lower:
            raise UsageError(
                f"the config {key} is not"
                f" known{suggestion(key, names_by_lower) or '; `mlflow deployments help -t tsx` lists all'}"
            )
    return {names_by_lower[key]: value for key, value in keys.items()}
