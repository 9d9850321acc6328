"""The target `tsx` of `mlflow deployments`: MLflow's models, deployed to a running server by its management API."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import parse_qsl, urlsplit

from mlflow.artifacts import download_artifacts
from mlflow.deployments import BaseDeploymentClient, PredictionsResponse
from mlflow.exceptions import MlflowException, get_error_code
from mlflow.protos.databricks_pb2 import INVALID_PARAMETER_VALUE, RESOURCE_ALREADY_EXISTS, RESOURCE_DOES_NOT_EXIST
from mlflow.utils.proto_json_utils import dump_input_data

from tsx_archiver import ArchiveError, Manifest, inspect_archive
from tsx_archiver.metadata.mlmodel import MANIFEST_KEY, PYFUNC, PYFUNC_FLAVOR
from tsx_archiver.storage.digest import content_digest
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

Config: TypeAlias = "Mapping[str, Any] | None"
Text: TypeAlias = "str | None"
Deployed: TypeAlias = dict[str, str]
PACKING = ("VERSION", "HANDLER", "MODEL_FILE", "EXTRA_FILES", "REQUIREMENTS_FILE", "CONFIG_FILE", "EXPORT_PATH")
FILES = ("MODEL_FILE", "REQUIREMENTS_FILE", "CONFIG_FILE")
OWN = ("url", "model_name", "handler", "replace", "model_version")  # parameters of the management API that the target itself gives
ENDPOINT = ("traffic", "default")
PROTOCOL = {"inputs", "instances", "dataframe_split", "dataframe_records"}
ERRORS = {400: INVALID_PARAMETER_VALUE, 404: RESOURCE_DOES_NOT_EXIST, 409: RESOURCE_ALREADY_EXISTS}
HELP = f"""Targets: tsx://HOST:PORT, with PORT for predictions (8080 if not given) and the next one for management;
tsx://HOST:PORT?management=PORT&scheme=https; or tsx, for the addresses of tsx's own settings, as are TSX_INFERENCE_TOKEN and
TSX_MANAGEMENT_TOKEN. A deployment NAME is a model, NAME/VERSION one of its versions; with --endpoint, that is the model, NAME the version.
Config of create and update: {", ".join(PACKING)} (all but the last as for `tsx archive`; EXPORT_PATH is the server's model_store as this
machine sees it), and the parameters of POST /models, such as batch_size; of update without a model, those of PUT /models.
Config of update-endpoint: traffic=VERSION=PERCENT,VERSION=PERCENT and default=VERSION.
Config of run-local: the keys in capitals; all others are settings of the server, such as inference_address."""


class DeployedModel(NamedTuple):
    """What a deployment is on the server. Without a version, that of the model that is packed, or the model's default one."""

    model: str
    version: str | None = None

    @classmethod
    def of(cls, name: str, endpoint: str | None) -> DeployedModel:
        model, _, version = (endpoint, "", name) if endpoint else name.partition("/")
        return cls(model, version or None)

    @property
    def path(self) -> list[str]:
        return ["models", self.model, *([self.version] if self.version else [])]


class TsxDeploymentClient(BaseDeploymentClient):
    """Errors are MlflowException, in the server's own words."""

    def __init__(self, target_uri: str) -> None:
        super().__init__(target_uri)  # type: ignore[no-untyped-call]  # MLflow's
        with _as_mlflow():
            self._settings, _ = read_settings(None, quiet=True)
            self._inference, self._management = self._server("inference"), self._server("management")

    def create_deployment(self, name: str, model_uri: str, flavor: Text = None, config: Config = None, endpoint: Text = None) -> Deployed:
        with _as_mlflow():
            return {"name": name, "flavor": self._deploy(DeployedModel.of(name, endpoint), model_uri, flavor, config, replace=False)}

    def update_deployment(
        self, name: str, model_uri: Text = None, flavor: Text = None, config: Config = None, endpoint: Text = None
    ) -> Deployed:
        """With a model, it takes the place of the deployed one without losing a request; else the workers and limits change."""
        place = DeployedModel.of(name, endpoint)
        with _as_mlflow():
            if model_uri is not None:
                return {"name": name, "flavor": self._deploy(place, model_uri, flavor, config, replace=True)}
            if flavor is not None:
                raise UsageError(f"the flavour {flavor} is of a new model: give --model-uri as well")
            self._management.call("PUT", path(*place.path, **{"synchronous": True, **_checked(config, ScaleParameters.model_fields)}))
            return {"name": name, "flavor": "unchanged"}

    def delete_deployment(self, name: str, config: Config = None, endpoint: str | None = None) -> None:
        place = DeployedModel.of(name, endpoint)
        with _as_mlflow():
            _checked(config, ())
            if place.version is None:
                self.delete_endpoint(place.model)
            elif self._described(place):
                self._management.call("DELETE", path(*place.path))

    def list_deployments(self, endpoint: str | None = None) -> list[dict[str, Any]]:
        with _as_mlflow():
            if endpoint is not None:
                return [{"name": each["modelVersion"], "endpoint": endpoint} for each in self._described(DeployedModel(endpoint, "all"))]
            names = [each["name"] for each in self.list_endpoints()]
            return [{"name": name, "version": self._described(DeployedModel(name))[0]["modelVersion"]} for name in names]

    def get_deployment(self, name: str, endpoint: str | None = None) -> dict[str, Any]:
        with _as_mlflow():
            return {"name": name, **self._management.call("GET", path(*DeployedModel.of(name, endpoint).path)).json()[0]}

    def predict(self, deployment_name: str | None = None, inputs: Any = None, endpoint: str | None = None) -> PredictionsResponse:
        """`inputs`: a DataFrame, an array, a list, arrays by name, or a request of MLflow's scoring protocol."""
        place = DeployedModel.of(deployment_name, endpoint) if deployment_name else DeployedModel(endpoint or "")
        if isinstance(inputs, Mapping):
            arrays = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in inputs.items()}
            inputs = json.dumps(arrays if PROTOCOL & set(arrays) else {"inputs": arrays})
        target, body = path("predictions", *place.path[1:]), dump_input_data(inputs).encode()
        with _as_mlflow():
            answer = self._inference.call("POST", target, body, {"Content-Type": "application/json"}).json()
        return PredictionsResponse(answer if isinstance(answer, dict) and "predictions" in answer else {"predictions": answer})

    # An endpoint is a model of the server, and its deployments are the versions of the model

    def create_endpoint(self, name: str, config: Config = None) -> dict[str, str]:
        """Nothing is made before its first deployment: a model of the server has at least one version."""
        with _as_mlflow():
            _checked(config, ())
            if self._described(DeployedModel(name)):
                raise MlflowException(f"The endpoint {name} exists already.", error_code=RESOURCE_ALREADY_EXISTS)
        return {"name": name}

    def update_endpoint(self, endpoint: str, config: Config = None) -> None:
        """`traffic`: shares in percent by deployment; `default`: the deployment that answers without them."""
        with _as_mlflow():
            given = _checked(config, ENDPOINT)
            if default := given.get("default"):
                self._management.call("PUT", path("models", endpoint, str(default), "set-default"))
            if shares := given.get("traffic"):
                pairs = [f"{word}={share}" for word, share in shares.items()] if isinstance(shares, Mapping) else split_list([shares])
                target = path("models", endpoint, "traffic")
                weights = with_shares(read_weights(pairs), self._management.call_json("GET", target))
                self._management.call_json("PATCH", target, {"weights": weights})

    def delete_endpoint(self, endpoint: str) -> None:
        with _as_mlflow():
            found, default = self._described(DeployedModel(endpoint, "all")), self._described(DeployedModel(endpoint))
            for each in [*(each for each in found if each["modelVersion"] != default[0]["modelVersion"]), *default]:  # which goes last
                self._management.call("DELETE", path("models", endpoint, each["modelVersion"]))

    def list_endpoints(self) -> list[dict[str, str]]:
        with _as_mlflow():
            return [{"name": each["modelName"]} for each in all_models(self._management)]

    def get_endpoint(self, endpoint: str) -> dict[str, Any]:
        with _as_mlflow():
            found = self._management.call_json("GET", path("models", endpoint, "traffic"))
        return {"name": endpoint, "default": found["default"], "traffic": {each["version"]: each["share"] for each in found["table"]}}

    def _server(self, role: str) -> Server:
        url = address(self.target_uri, role) or getattr(self._settings, f"{role}_address")
        token = getattr(self._settings, f"{role}_token")
        return Server(url, token, role=role, certificate=self._settings.certificate_file, absent="start one with `tsx serve`")

    def _deploy(self, place: DeployedModel, uri: str, flavor: str | None, config: Config, *, replace: bool) -> str:
        """The flavour of the model."""
        given = _checked(config, (*PACKING, *RegisterParameters.model_fields))
        store = given.get("EXPORT_PATH") or self._settings.model_store
        if store is None or not Path(store).is_dir():
            raise UsageError(f"there is no directory {store or ''} for the archive: -C EXPORT_PATH=DIR names the server's model_store")
        with tempfile.TemporaryDirectory(prefix="tsx-mlflow-") as made:
            archive, manifest, found = _packed(uri, place, flavor, given, Path(made))
            if not replace and self._described(DeployedModel(place.model, manifest.version)):
                text = f"The deployment {place.model}/{manifest.version} exists already; update it, or delete it first."
                raise MlflowException(text, error_code=RESOURCE_ALREADY_EXISTS)
            with archive.open("rb") as content:  # named by it: a server that reads another store finds nothing, rather than an old file
                file = Path(store) / f"{place.model}-{manifest.version}-{content_digest(content)[:12]}.mar"
            shutil.move(archive, file)
        parameters = {"synchronous": True, "replace": replace, "initial_workers": None if replace else 1}
        parameters |= {key: value for key, value in given.items() if key not in PACKING}
        try:
            self._management.call("POST", path("models", url=file.name, model_name=place.model, **parameters))
        except RequestFailed as error:
            file.unlink()
            if error.status != 404:
                raise
            raise error.hinted(f"the server does not read {store}: -C EXPORT_PATH=DIR names its model_store") from error
        return found

    def _described(self, place: DeployedModel) -> list[dict[str, Any]]:
        """Empty where it does not exist."""
        response = self._management.send("GET", target := path(*place.path))
        body = response.body()
        if response.status >= 400 and response.status != 404:
            raise self._management.refusal(response.status, body, target)
        return [] if response.status == 404 else list(json.loads(body))


def run_local(name: str, model_uri: str, flavor: str | None = None, config: Config = None) -> None:
    """Serves the model by a server of its own until it is interrupted; what is no key of an archive is a setting of the server."""
    given = {key.upper() if key.upper() in PACKING else key: value for key, value in (config or {}).items()}
    with _as_mlflow(), tempfile.TemporaryDirectory(prefix="tsx-mlflow-") as made:
        archive, _, _ = _packed(model_uri, DeployedModel.of(name, None), flavor, given, Path(made))
        settings = [part for key, value in given.items() if key not in PACKING for part in ("--set", f"{key}={value}")]
        code = subprocess.run([sys.executable, "-m", "tsx_cli", "serve", str(archive), *settings], check=False).returncode
        if code:
            raise CliError(f"the server ended with status {code}; its own output says more")


def target_help() -> str:
    return HELP


def address(target: str, role: str) -> str | None:
    """Of a target URI; None where the settings have it. Raises UsageError."""
    parts = urlsplit(target)
    if not parts.netloc:
        return None
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    scheme, port = options.pop("scheme", "http"), parts.port or 8080
    management = options.pop("management", str(port + 1))
    if options or scheme not in ("http", "https") or not management.isdecimal():
        raise UsageError(f"'{target}' is not a target; one looks like tsx://HOST:PORT?management=PORT&scheme=https")
    host = parts.netloc.rpartition(":")[0] if parts.port else parts.netloc
    return f"{scheme}://{host}:{port if role == 'inference' else management}"


def _packed(uri: str, place: DeployedModel, flavor: str | None, given: Mapping[str, Any], directory: Path) -> tuple[Path, Manifest, str]:
    """The archive of a model, its manifest and its flavour. Raises CliError, ArchiveError and MlflowException."""
    if "://" in uri or uri.startswith("file:"):
        uri = download_artifacts(uri, dst_path=str(directory))
    version = given.get("VERSION", place.version)
    if place.version and version != place.version:
        raise UsageError(f"VERSION={version} is not the version {place.version} of the deployment; leave it out")
    handler = given.get("HANDLER") or (PYFUNC if flavor == PYFUNC_FLAVOR else None)
    model_file, requirements, settings = (Path(given[key]) if key in given else None for key in FILES)
    parts = HandlerFiles(handler, model_file, split_list([given.get("EXTRA_FILES", "")]))
    order = Packing(parts, place.model, version, requirements, settings, directory, "default", force=True, samples=(), import_it=False)
    archive = Path(pack(Path(uri), order, quiet=True).archive)
    manifest = inspect_archive(archive).manifest
    own = str((manifest.data.get(MANIFEST_KEY) or {}).get("flavor", "pytorch"))
    if flavor not in (None, own, PYFUNC_FLAVOR):
        raise UsageError(f"{uri} has the flavour {own}, not {flavor}; leave --flavor out")
    return archive, manifest, own


def _checked(config: Config, known: Collection[str]) -> dict[str, Any]:
    """The keys in their own spelling. Raises UsageError."""
    spelled = {name.lower(): name for name in known if name not in OWN}
    found = {key.lower().replace("-", "_"): value for key, value in (config or {}).items()}
    for key in found:
        if key not in spelled:
            raise UsageError(f"the config {key} is not known{suggestion(key, spelled) or '; `mlflow deployments help -t tsx` lists all'}")
    return {spelled[key]: value for key, value in found.items()}


@contextmanager
def _as_mlflow() -> Iterator[None]:
    try:
        yield
    except RequestFailed as error:
        raise MlflowException(error.message, error_code=ERRORS.get(error.status, get_error_code(error.status))) from error
    except (CliError, ArchiveError, TsxError) as error:
        raise MlflowException(error.message, error_code=INVALID_PARAMETER_VALUE) from error
