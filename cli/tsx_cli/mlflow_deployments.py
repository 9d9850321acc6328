"""The target `tsx` of `mlflow deployments`: MLflow's models, deployed to a running server by its management API."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from mlflow.artifacts import download_artifacts
from mlflow.deployments import BaseDeploymentClient, PredictionsResponse
from mlflow.exceptions import MlflowException
from mlflow.protos import databricks_pb2 as codes
from mlflow.utils.proto_json_utils import dump_input_data

from tsx_archiver import DEFAULT_VERSION, ArchiveError, inspect_archive
from tsx_archiver.metadata.mlmodel import MANIFEST_KEY, PYFUNC, PYFUNC_FLAVOR
from tsx_cli.archive.mlflow import REGISTRY, RUNS
from tsx_cli.archive.model_file import HandlerFiles
from tsx_cli.archive.packing import Packing, pack
from tsx_cli.common.client import RequestFailed, Server, path
from tsx_cli.common.failure import CliError, UsageError
from tsx_cli.common.inputs import split_list
from tsx_cli.common.options import read_settings
from tsx_cli.models.command import all_models
from tsx_cli.models.traffic import read_weights, with_shares
from tsx_runtime.api.schemas import RegisterParameters, ScaleParameters
from tsx_runtime.errors import TsxError
from tsx_runtime.shared.suggestions import suggestion

PACKING = ("VERSION", "HANDLER", "MODEL_FILE", "EXTRA_FILES", "REQUIREMENTS_FILE", "CONFIG_FILE", "EXPORT_PATH")
OWN = ("url", "model_name", "handler", "replace", "model_version")  # parameters of the management API that the target itself gives
ENDPOINT = ("traffic", "default")
PROTOCOL = {"inputs", "instances", "dataframe_split", "dataframe_records"}
ERRORS = {
    400: codes.INVALID_PARAMETER_VALUE,
    401: codes.PERMISSION_DENIED,
    403: codes.PERMISSION_DENIED,
    404: codes.RESOURCE_DOES_NOT_EXIST,
    409: codes.RESOURCE_ALREADY_EXISTS,
}


class Place(NamedTuple):
    """What a deployment is on the server. Without a version, that of the model that is packed, or the model's default one."""

    model: str
    version: str | None

    @classmethod
    def of(cls, name: str, endpoint: str | None) -> Place:
        """The model that an endpoint is and its version `name`; without an endpoint, of NAME or NAME/VERSION."""
        model, _, version = (endpoint, "", name) if endpoint else name.partition("/")
        return cls(model, version or None)

    @property
    def path(self) -> list[str]:
        return ["models", self.model, *([self.version] if self.version else [])]


class TsxDeploymentClient(BaseDeploymentClient):
    """Errors are MlflowException, in the server's own words."""

    def __init__(self, target_uri: str) -> None:
        super().__init__(target_uri)
        with _as_mlflow():
            self._settings, _ = read_settings(None, quiet=True)
            self._inference, self._management = self._server("inference"), self._server("management")

    def create_deployment(
        self,
        name: str,
        model_uri: str,
        flavor: str | None = None,
        config: Mapping[str, Any] | None = None,
        endpoint: str | None = None,
    ) -> dict[str, str]:
        with _as_mlflow():
            return self._deploy(Place.of(name, endpoint), name, model_uri, flavor, config or {}, replace=False)

    def update_deployment(
        self,
        name: str,
        model_uri: str | None = None,
        flavor: str | None = None,
        config: Mapping[str, Any] | None = None,
        endpoint: str | None = None,
    ) -> dict[str, str]:
        """With a model, it takes the place of the deployed one without losing a request; else the workers and limits change."""
        place = Place.of(name, endpoint)
        with _as_mlflow():
            if model_uri is not None:
                return self._deploy(place, name, model_uri, flavor, config or {}, replace=True)
            if flavor is not None:
                raise UsageError(f"the flavour {flavor} is of a new model: give --model-uri as well")
            given = _checked(config or {}, ScaleParameters.model_fields)
            self._management.call("PUT", path(*place.path, **{"synchronous": True, **given}))
            return {"name": name, "flavor": str(self._origin(place).get("flavor", "pytorch"))}

    def delete_deployment(self, name: str, config: Mapping[str, Any] | None = None, endpoint: str | None = None) -> None:
        place = Place.of(name, endpoint)
        with _as_mlflow(), _absent_is_fine():
            _checked(config or {}, ())
            if place.version is None:
                self._delete_all(place.model)
            else:
                self._management.call("DELETE", path(*place.path))

    def list_deployments(self, endpoint: str | None = None) -> list[dict[str, Any]]:
        with _as_mlflow():
            if endpoint is not None:
                return [{"name": each["modelVersion"], "endpoint": endpoint} for each in self._described(Place(endpoint, "all"))]
            names = [each["modelName"] for each in all_models(self._management)]
            return [{"name": name, "version": self._described(Place(name, None))[0]["modelVersion"]} for name in names]

    def get_deployment(self, name: str, endpoint: str | None = None) -> dict[str, Any]:
        with _as_mlflow():
            return {"name": name, **self._described(Place.of(name, endpoint))[0]}

    def predict(self, deployment_name: str | None = None, inputs: Any = None, endpoint: str | None = None) -> PredictionsResponse:
        """`inputs`: a DataFrame, an array, a list, arrays by name, or a request of MLflow's scoring protocol."""
        place = Place.of(deployment_name, endpoint) if deployment_name else Place(endpoint or "", None)
        if isinstance(inputs, Mapping):
            arrays = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in inputs.items()}
            body = json.dumps(arrays if PROTOCOL & set(arrays) else {"inputs": arrays})
        else:
            body = dump_input_data(inputs)
        with _as_mlflow():
            target = path("predictions", *place.path[1:])
            answer = self._inference.call("POST", target, body.encode(), {"Content-Type": "application/json"}).json()
        return PredictionsResponse(answer if isinstance(answer, dict) and "predictions" in answer else {"predictions": answer})

    # An endpoint is a model of the server, and its deployments are the versions of the model

    def create_endpoint(self, name: str, config: Mapping[str, Any] | None = None) -> dict[str, str]:
        """Nothing is made before its first deployment: a model of the server has at least one version."""
        with _as_mlflow():
            _checked(config or {}, ())
            if any(each["modelName"] == name for each in all_models(self._management)):
                raise MlflowException(f"The endpoint {name} exists already.", error_code=codes.RESOURCE_ALREADY_EXISTS)
        return {"name": name}

    def update_endpoint(self, endpoint: str, config: Mapping[str, Any] | None = None) -> None:
        """`traffic`: shares in percent by deployment; `default`: the deployment that answers without them."""
        with _as_mlflow():
            given = _checked(config or {}, ENDPOINT)
            if default := given.get("default"):
                self._management.call("PUT", path("models", endpoint, str(default), "set-default"))
            if shares := given.get("traffic"):
                pairs = [f"{word}={share}" for word, share in shares.items()] if isinstance(shares, Mapping) else split_list([shares])
                target = path("models", endpoint, "traffic")
                weights = with_shares(read_weights(pairs), self._management.call_json("GET", target))
                self._management.call_json("PATCH", target, {"weights": weights})

    def delete_endpoint(self, endpoint: str) -> None:
        with _as_mlflow(), _absent_is_fine():
            self._delete_all(endpoint)

    def list_endpoints(self) -> list[dict[str, str]]:
        with _as_mlflow():
            return [{"name": each["modelName"]} for each in all_models(self._management)]

    def get_endpoint(self, endpoint: str) -> dict[str, Any]:
        with _as_mlflow():
            found = self._management.call_json("GET", path("models", endpoint, "traffic"))
        shares = {each["version"]: each["share"] for each in found["table"]}
        return {"name": endpoint, "default": found["default"], "traffic": shares}

    def _server(self, role: str) -> Server:
        token = getattr(self._settings, f"{role}_token")
        url = address(self.target_uri, role) or getattr(self._settings, f"{role}_address")
        return Server(url, token, role=role, certificate=self._settings.certificate_file, absent="start one with `tsx serve`")

    def _deploy(self, place: Place, name: str, uri: str, flavor: str | None, config: Mapping[str, Any], *, replace: bool) -> dict[str, str]:
        given = _checked(config, (*PACKING, *RegisterParameters.model_fields))
        store = given.get("EXPORT_PATH") or self._settings.model_store
        if store is None or not Path(store).is_dir():
            raise UsageError(f"{store or 'no directory'} to write the archive to: -C EXPORT_PATH=DIR names the server's model_store")
        with tempfile.TemporaryDirectory(prefix="tsx-mlflow-") as made:
            archive = packed(uri, place, flavor, given, Path(made))
            manifest = inspect_archive(archive).manifest
            if not replace and self._exists(Place(place.model, manifest.version)):
                text = f"The deployment {place.model}/{manifest.version} exists already; update it, or delete it first."
                raise MlflowException(text, error_code=codes.RESOURCE_ALREADY_EXISTS)
            file = Path(store) / f"{place.model}-{manifest.version}{archive.suffix}"
            shutil.move(archive, file)
        parameters = {"initial_workers": None if replace else 1} | {key: value for key, value in given.items() if key not in PACKING}
        try:
            self._management.call(
                "POST", path("models", url=file.name, model_name=place.model, replace=replace, **{"synchronous": True, **parameters})
            )
        except RequestFailed as error:
            if error.status == 404:
                raise error.hinted(f"the server does not read {store}: -C EXPORT_PATH=DIR names its model_store") from error
            raise
        return {"name": name, "flavor": str((manifest.data.get(MANIFEST_KEY) or {}).get("flavor", "pytorch"))}

    def _exists(self, place: Place) -> bool:
        with _absent_is_fine():
            self._described(place)
            return True
        return False

    def _described(self, place: Place) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._management.call("GET", path(*place.path)).json()
        return found

    def _origin(self, place: Place) -> Mapping[str, Any]:
        try:
            described = self._management.call("GET", path(*place.path, customized=True)).json()[0].get("customizedMetadata")
        except RequestFailed:  # no worker is ready to tell
            return {}
        return (described.get(MANIFEST_KEY) or {}) if isinstance(described, dict) else {}

    def _delete_all(self, model: str) -> None:
        """The default version last: the server keeps one as long as there are others."""
        default = self._described(Place(model, None))[0]["modelVersion"]
        versions = [each["modelVersion"] for each in self._described(Place(model, "all"))]
        for version in sorted(versions, key=lambda each: bool(each == default)):
            self._management.call("DELETE", path("models", model, version))


def run_local(name: str, model_uri: str, flavor: str | None = None, config: Mapping[str, Any] | None = None) -> None:
    """Serves the model by a server of its own until it is interrupted; what is no key of an archive is a setting of the server."""
    given = {key.upper() if key.upper() in PACKING else key: value for key, value in (config or {}).items()}
    with _as_mlflow(), tempfile.TemporaryDirectory(prefix="tsx-mlflow-") as made:
        archive = packed(model_uri, Place.of(name, None), flavor, given, Path(made))
        settings = [part for key, value in given.items() if key not in PACKING for part in ("--set", f"{key}={value}")]
        code = subprocess.run([sys.executable, "-m", "tsx_cli", "serve", str(archive), *settings], check=False).returncode
        if code:
            raise CliError(f"the server ended with status {code}; its own output says more")


def target_help() -> str:
    return """Target URI
  tsx://HOST:PORT                   PORT is that of predictions (8080 if not given), management is the next one
  tsx://HOST:PORT?management=PORT   another port for management
  tsx://HOST:PORT?scheme=https      a server with a certificate
  tsx                               the addresses of tsx's own settings (tsx.toml, TSX_INFERENCE_ADDRESS, TSX_MANAGEMENT_ADDRESS)
Tokens come from TSX_INFERENCE_TOKEN and TSX_MANAGEMENT_TOKEN, a certificate to trust from TSX_CERTIFICATE_FILE.

Models: models:/NAME/VERSION, models:/NAME@ALIAS, runs:/ID/PATH, a directory with MLmodel, an archive, or a model file of torch.
A deployment NAME is a model of the server; NAME/VERSION is one version. With --endpoint, the endpoint is the model and NAME its version.

Config of create and update
  EXPORT_PATH=DIR                   the server's model_store as this machine sees it (by default TSX_MODEL_STORE)
  VERSION=1.0                       by default that of the registry
  HANDLER, MODEL_FILE, EXTRA_FILES, REQUIREMENTS_FILE, CONFIG_FILE     as those of `tsx archive`
  batch_size, max_batch_delay, initial_workers, response_timeout, ...  as those of POST /models; of update without a model, PUT /models
Config of update-endpoint
  traffic=1=90,2=10                 percent of the requests by version
  default=2                         the version that answers where nothing is said of traffic
Config of run-local: the keys of an archive; all others are settings of the server, such as inference_address
"""


def address(target: str, role: str) -> str | None:
    """Of a target URI; None where the settings have it. Raises UsageError."""
    parts = urlsplit(target)
    if not parts.scheme or not parts.netloc:
        return None
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    scheme, port = options.pop("scheme", "http"), parts.port or 8080
    management = options.pop("management", str(port + 1))
    if options or scheme not in ("http", "https") or not management.isdecimal():
        raise UsageError(f"'{target}' is not a target; one looks like tsx://HOST:PORT?management=PORT&scheme=https")
    host = parts.netloc.rpartition(":")[0] if parts.port else parts.netloc
    return f"{scheme}://{host}:{port if role == 'inference' else management}"


def packed(uri: str, place: Place, flavor: str | None, given: Mapping[str, Any], directory: Path) -> Path:
    """The archive of a model. Raises CliError, ArchiveError and MlflowException."""
    if "://" in uri or uri.startswith("file:"):
        uri = download_artifacts(uri, dst_path=str(directory))
    if place.version and given.get("VERSION", place.version) != place.version:
        raise UsageError(f"VERSION={given['VERSION']} is not the version {place.version} that the deployment's name says; leave it out")
    version, archive = place.version or given.get("VERSION"), Path(uri)
    if uri.endswith((".mar", ".tar.gz")):
        archive = Path(shutil.copy(uri, directory))
    else:
        handler = given.get("HANDLER") or (PYFUNC if flavor in (PYFUNC_FLAVOR, "pyfunc") else None)
        files = {key: Path(given[key]) if given.get(key) else None for key in ("MODEL_FILE", "REQUIREMENTS_FILE", "CONFIG_FILE")}
        parts = HandlerFiles(handler, files["MODEL_FILE"], split_list([given.get("EXTRA_FILES", "")]))
        order = Packing(
            parts,
            place.model,
            version,
            files["REQUIREMENTS_FILE"],
            files["CONFIG_FILE"],
            directory,
            "default",
            True,
            (),
            not uri.startswith((REGISTRY, RUNS)),
        )
        archive = Path(pack(Path(uri), order, quiet=True).archive)
    manifest = inspect_archive(archive).manifest
    if place.version and manifest.version != place.version:
        raise UsageError(f"{uri} has the version {manifest.version or DEFAULT_VERSION}, not {place.version}; name the deployment like it")
    own = str((manifest.data.get(MANIFEST_KEY) or {}).get("flavor", "pytorch"))
    if flavor is not None and flavor not in (own, PYFUNC_FLAVOR, "pyfunc"):
        raise UsageError(f"{uri} has the flavour {own}, not {flavor}; leave --flavor out")
    return archive


def _checked(config: Mapping[str, Any], known: Any) -> dict[str, Any]:
    """The keys in their own spelling. Raises UsageError."""
    names = [name for name in known if name not in OWN]
    spelled = {name.lower().replace("-", "_"): name for name in names}
    for key in config:
        if key.lower().replace("-", "_") not in spelled:
            hint = suggestion(key, names) or (f"; there are {', '.join(names)}" if names else "; there are none here")
            raise UsageError(f"the config {key} is not known{hint}")
    return {spelled[key.lower().replace("-", "_")]: value for key, value in config.items()}


@contextmanager
def _as_mlflow() -> Iterator[None]:
    try:
        yield
    except RequestFailed as error:
        raise MlflowException(error.message, error_code=ERRORS.get(error.status, codes.INTERNAL_ERROR)) from error
    except (UsageError, ArchiveError) as error:
        raise MlflowException(error.message, error_code=codes.INVALID_PARAMETER_VALUE) from error
    except (CliError, TsxError) as error:
        raise MlflowException(error.message, error_code=codes.INTERNAL_ERROR) from error


@contextmanager
def _absent_is_fine() -> Iterator[None]:
    try:
        yield
    except RequestFailed as error:
        if error.status != 404:
            raise
