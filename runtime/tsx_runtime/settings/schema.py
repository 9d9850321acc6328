"""The typed settings of a server. `sources.py` finds their values.

Settings of one model (batch size, workers, device) are in its archive's `model-config.yaml`
(`tsx_archiver.ModelConfig`). A server may override them for a model with `[models.NAME]` in
`tsx.toml` or `--set models.NAME.batch_size=8`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from tsx_archiver import Limits, default_cache
from tsx_archiver.metadata.model_limits import LIMITS
from tsx_archiver.storage.cache import DAY_S, CacheLimits
from tsx_archiver.storage.cache import Cache as ArchiveCache
from tsx_runtime.feature import extended
from tsx_runtime.settings.addresses import Address as ParsedAddress
from tsx_runtime.settings.addresses import parse_address
from tsx_runtime.settings.fields import (
    Address,
    BatchBuckets,
    Described,
    FeatureModelSettings,
    FeatureSettings,
    HeaderText,
    IdleTime,
    LogFraction,
    Networks,
    Pattern,
    Secret,
    ServerSettings,
    Size,
    SloText,
    to_lower,
)
from tsx_runtime.settings.model_limits import Bytes, OneOf, Seconds, server_default, with_limits
from tsx_runtime.settings.torchserve import Snapshot, Versions
from tsx_runtime.settings.traffic_policy import Traffic
from tsx_runtime.shared.redaction import redacted_values
from tsx_runtime.wire import MAX_FIELD

# The HTTP APIs; the setting ROLE_address has the address of one.
ROLES = ("inference", "management", "metrics")


@with_limits()
class ModelSettings(Described):
    """The settings of a server for one model; they override the archive's.

    A registration that sets the same value overrides them.
    """

    workers: int | None = Field(None, ge=0)
    """workers to start"""
    max_workers: int | None = Field(None, ge=0)
    """workers that it may have under load; as many as are started if not set"""
    device: Literal["cpu", "gpu"] | None = None
    """where the model runs"""
    slo: SloText | None = None
    """latency target, such as p99<50ms, in place of batch_size and job_queue_size; see slo.md"""
    scale_to_zero: IdleTime | None = None
    """time without a request after which it is unloaded, such as 10m; 0 = never"""
    pass_env: list[str] | None = None
    """additional credentials in the server's environment that its workers can read"""
    pass_headers: list[str] | None = None
    """additional headers with clients' credentials that its handler can read"""
    batch_buckets: BatchBuckets | None = None
    """preferred numbers of requests in a batch"""
    traffic: Traffic | None = None
    """how requests are split between its versions; see routing.md"""


if not TYPE_CHECKING:  # A type checker sees the fields of features in the features' classes.
    ModelSettings = extended(ModelSettings, FeatureModelSettings, "settings")


class Settings(ServerSettings):
    """All settings of a server. Settings that TorchServe has keep its names and defaults."""

    inference_address: Address = "http://127.0.0.1:8080"
    """address of the inference API"""
    management_address: Address = "http://127.0.0.1:8081"
    """address of the management API"""
    metrics_address: Address = "http://127.0.0.1:8082"
    """address of the metrics for Prometheus"""
    enable_metrics_api: bool = True
    """listen at metrics_address"""
    certificate_file: Path | None = None
    """PEM file with the certificate and its chain for https addresses"""
    private_key_file: Path | None = None
    """PEM file with the certificate's private key"""
    keystore: Path | None = None
    """Java keystore, PKCS12 or JKS, in place of the two PEM files"""
    keystore_pass: Annotated[str, Secret()] = "changeit"
    """password of the keystore and of its key"""
    model_store: Path | None = None
    """directory of the archives that can be registered by file name"""
    allowed_urls: list[str] = []
    """sources for models, and for images and sounds of chats: hosts, or regular expressions that
    match whole URLs"""
    allow_private_urls: bool = False
    """also download from addresses that are not public"""
    s3_endpoint_url: str | None = Field(None, min_length=1)
    """endpoint for s3:// URLs; if not set, the one of AWS or of boto3's configuration"""
    load_models: list[str] = []
    """models to load at start: archives, [name=]file, or 'all' in the model store"""
    default_workers_per_model: int = Field(0, ge=0)
    """workers of a model that does not set their number; 0 = one per GPU, and without a GPU one, or
    several for a small Hugging Face model"""
    default_response_timeout: Seconds = server_default("response_timeout")
    default_startup_timeout: Seconds = server_default("startup_timeout")
    unregister_model_timeout: Seconds = Field(120, ge=0)
    """maximum time for a model to finish its work when it is removed, in seconds; with 0, its
    workers are ended first"""
    job_queue_size: int = server_default("job_queue_size")
    max_queue_bytes: Bytes = server_default("max_queue_bytes")
    overload_status: Annotated[int, OneOf(LIMITS["overload_status"].choices)] = server_default(
        "overload_status"
    )
    max_request_size: Bytes = Field(6_553_500, ge=1, le=MAX_FIELD)
    """maximum size of a request's body, in bytes"""
    max_response_size: Bytes = Field(6_553_500, ge=1, le=MAX_FIELD)
    """maximum size of an answer's body, in bytes"""
    max_inflight_bytes: Bytes = Field(1 << 30, ge=1)
    """maximum bytes of all bodies over 64 KiB in flight and of unread answers; at least two of
    max_request_size"""
    max_header_size: Bytes = Field(64 << 10, ge=1024)
    """maximum size of a request's headers, in bytes"""
    header_timeout: Seconds = Field(10, ge=1)
    """maximum time to receive a request's headers, in seconds"""
    body_timeout: Seconds = Field(30, ge=1)
    """maximum time to receive a body, in seconds, plus one second for each 16 KiB received"""
    body_idle_timeout: Seconds = Field(10, ge=1)
    """maximum pause in receiving a request's body, in seconds"""
    write_timeout: Seconds = Field(30, ge=1)
    """maximum time in which a client reads nothing of its answer, in seconds"""
    keep_alive_timeout: Seconds = Field(75, ge=1)
    """maximum idle time of a connection between requests, in seconds"""
    number_of_gpu: int | None = Field(None, ge=0)
    """number of GPUs to use; all visible GPUs if not set"""
    limit_max_image_pixels: bool = True
    """refuse images that would decode to a very large size"""
    decode_input_request: bool = True
    """decode JSON and text bodies before the handler gets them"""
    json_nan: Literal["null", "string", "literal"] = "null"
    """NaN and infinities in JSON answers: null, string ("NaN"), or literal (NaN, which is not
    JSON)"""
    guess_content_type: bool = False
    """give an answer without a content type the one that its content looks like: JSON, text or
    bytes"""
    handler_error_status: Annotated[int, OneOf((500, 503))] = 500
    """status of a request that made its handler fail: 500, or 503 as in TorchServe"""
    default_service_handler: str | None = None
    """handler of archives without one"""
    service_envelope: Literal["body", "json", "kserve", "kservev2"] | None = None
    """service envelope of the requests: body, json, kserve or kservev2; none if not set"""
    inference_token: Annotated[str | None, Secret()] = Field(None, min_length=1)
    """bearer token that predictions must carry"""
    management_token: Annotated[str | None, Secret()] = Field(None, min_length=1)
    """bearer token that management and metrics calls must carry"""
    disable_token_authorization: bool = False
    """serve without tokens on an address that is not loopback"""
    generate_tokens: bool = False
    """generate the tokens that are not set and write them to key_file, as TorchServe does"""
    api_token: Annotated[str | None, Secret()] = Field(None, min_length=1)
    """bearer token that GET /token must carry, which replaces a generated token"""
    key_file: Path = Path("key_file.json")
    """file for generated tokens; only the server's user can read it"""
    token_expiration_min: float = Field(60, gt=0, le=1e9)
    """validity of a generated token, in minutes"""
    max_connections_per_client: int | None = Field(None, ge=0)
    """maximum number of connections of one client; 0 = unlimited; not set: 1024 where other
    machines can connect"""
    max_requests_per_client: int | None = Field(None, ge=0)
    """maximum number of requests per second of one client; 0 = unlimited; not set: 20000 where
    other machines can connect"""
    max_failed_tokens: int | None = Field(None, ge=0)
    """maximum number of wrong tokens per minute of one client; 0 = unlimited; not set: 10 where
    other machines can connect"""
    trusted_proxies: Networks = []
    """addresses or networks of reverse proxies whose X-Forwarded-For header identifies the
    client"""
    token_failure_status: Annotated[int, OneOf((400, 401))] = 400
    """status of a request whose token is wrong: 400, as in TorchServe, or 401"""
    enable_model_api: bool = True
    """allow requests to register and remove models"""
    cors_allowed_origin: HeaderText | None = None
    """origin whose pages may read answers, such as https://my.site, or *"""
    cors_allowed_methods: HeaderText | None = None
    """methods that such pages may use, such as GET, POST, PUT, OPTIONS"""
    cors_allowed_headers: HeaderText | None = None
    """headers that such pages may send, such as X-Custom-Header"""
    allowed_hosts: list[str] = []
    """additional values of Host and Origin that predictions on loopback accept; * for any host and
    any site"""
    metrics_mode: Annotated[Literal["prometheus", "log", "legacy"], BeforeValidator(to_lower)] = (
        "prometheus"
    )
    """prometheus: only /metrics; log or legacy: also lines in ts_metrics.log and
    model_metrics.log"""
    metrics_config: Path | None = None
    """a metrics.yaml, which declares the metrics of the server and of handlers"""
    model_metrics_auto_detect: bool = True
    """show metrics of handlers that metrics_config does not declare"""
    disable_system_metrics: bool = False
    """omit the metrics of the machine"""
    system_metrics_cmd: str | None = Field(None, min_length=1)
    """program that prints the machine's metrics, in place of tsx's own collection"""
    metric_time_interval: Seconds = Field(60, ge=1)
    """interval of system_metrics_cmd and of the machine's log lines, in seconds"""
    server_timing_share: float = Field(0.0, ge=0, le=1)
    """share of the answers with a Server-Timing header"""
    access_log: LogFraction = 0.0
    """write a line for each answer: true, false, or a share of the answers, such as 1%"""
    log_format: Annotated[Literal["auto", "text", "json"], BeforeValidator(to_lower)] = "auto"
    """text or json; auto: JSON if the log goes to stderr and stderr is not a terminal"""
    log_location: Path | None = None
    """directory for ts_log.log, access_log.log and model_log.log; stderr if not set"""
    metrics_location: Path | None = None
    """directory for ts_metrics.log and model_metrics.log (metrics_mode = log); log_location if not
    set"""
    log_config: Path | None = None
    """a log4j2.xml, for its levels and sizes, or a YAML or JSON file for logging.config"""
    max_worker_requests: int = server_default("max_worker_requests")
    max_worker_memory: int = server_default("max_worker_memory")
    max_worker_age: Seconds = server_default("max_worker_age")
    heartbeat_timeout: Seconds = Field(60, ge=0)
    """time without a heartbeat after which an idle worker is killed, in seconds; 0 = never"""
    restart_when_dead: bool = False
    """/livez fails while a model has only workers that were given up, so that an orchestrator
    restarts the server"""
    shutdown_delay: Seconds = Field(0, ge=0)
    """time in which a stopping server reports that it is not ready but still accepts requests, in
    seconds"""
    drain_timeout: Seconds = Field(30, ge=0)
    """maximum time to answer accepted requests after a stop was requested, in seconds"""
    pass_env: list[str] = []
    """environment variables of secrets that workers can read: names, or patterns such as AWS_*"""
    pass_headers: list[str] = []
    """which of Authorization, Proxy-Authorization and Cookie handlers can read"""
    blacklist_env_vars: Pattern = None
    """regular expression for the whole names of environment variables that workers must not read"""
    state_dir: Path | None = None
    """directory for changes made while serving; .tsx in the model store, or the user's state
    directory, if not set"""
    cache_dir: Path | None = None
    """directory where archives are unpacked; the user's cache directory, or a temporary one, if not
    set"""
    max_cache_size: Size = 10 << 30
    """size of unpacked archives that are kept while no process uses them"""
    max_cache_age: IdleTime = 14 * DAY_S
    """time for which unpacked archives and environments are kept after their last use"""
    max_archive_size: Bytes = Field(64 << 30, ge=1)
    """maximum unpacked size of an archive, in bytes"""
    max_dense_archive_size: Bytes | None = Field(None, ge=0)
    """maximum unpacked size of members packed to less than a 200th of it, in bytes; half of the
    memory if not set"""
    max_archive_files: int = Field(10_000, ge=1)
    """maximum number of files in an archive"""
    cpus: int = Field(0, ge=0)
    """cores that all workers share; 0 = those that this process and its control group may use"""
    cpu_launcher_enable: bool = False
    """pin each CPU worker to its own cores"""
    cpu_launcher_args: str = ""
    """which cores: options of torch.backends.xeon.run_cpu"""
    plugins: list[str] = []
    """plugins to load: names of entry points of installed packages"""
    worker_preload: bool = True
    """start workers from a fork server that has torch imported"""
    models: dict[str, ModelSettings] = Field(
        {}, description="by model: " + ", ".join(ModelSettings.model_fields)
    )
    model_versions: Versions = {}
    """`models` of a config.properties: JSON, by model and version; see below"""
    model_snapshot: Snapshot | None = None
    """models to load at start, of a config.properties or snapshot: JSON; see below"""

    def addresses(self) -> dict[str, ParsedAddress]:
        roles = ROLES if self.enable_metrics_api else ROLES[:2]
        return {role: parse_address(getattr(self, f"{role}_address")) for role in roles}

    def archive_cache(self) -> ArchiveCache:
        """Return the cache of unpacked archives, with its limits.

        Raises:
            CacheError: The directory cannot be used.
        """
        return ArchiveCache(
            self.cache_dir or default_cache(), CacheLimits(self.max_cache_age, self.max_cache_size)
        )

    def archive_limits(self) -> Limits:
        """Return the limits above which the server and the commands refuse to unpack."""
        # The module imports psutil, which only commands that open archives need.
        from tsx_runtime.shared.memory import container_memory

        dense = (
            container_memory() // 2
            if self.max_dense_archive_size is None
            else self.max_dense_archive_size
        )
        return Limits(
            members=self.max_archive_files, total=self.max_archive_size, ratio_floor=dense
        )


if not TYPE_CHECKING:
    Settings = extended(Settings, FeatureSettings, "settings")

# Settings of earlier releases. Their values are fixed now, and setting them causes a warning.
REMOVED = frozenset(
    {
        f"grpc_{role}_max_connection_age_{suffix}"
        for role in ("inference", "management")
        for suffix in ("ms", "grace_ms")
    }
    | {f"ts_header_key_sequence_{suffix}" for suffix in ("id", "start", "end")}
    | {
        "body_min_rate",
        "frontends",
        "grpc_max_concurrent_streams",
        "grpc_max_connection_idle_ms",
        "heartbeat_interval",
        "jobs_share",
        "max_environments_size",
        "max_headers",
        "max_management_size",
        "metrics_push_interval",
    }
)
MODELS = "models"
# Settings with nested values, which a text on a command line or in a variable cannot set.
NESTED = {MODELS, "model_versions", "model_snapshot"}
SECRETS = frozenset(
    name
    for name, field in Settings.model_fields.items()
    if any(isinstance(mark, Secret) for mark in field.metadata)
)


def displayed(settings: Settings) -> dict[str, Any]:
    """Return all values with secrets hidden; a model's setting is named `models.MODEL.NAME`."""
    values = settings.model_dump(mode="json", exclude={MODELS})
    for model, overrides in settings.models.items():
        changes = overrides.model_dump(mode="json", exclude_none=True)
        values |= {f"{MODELS}.{model}.{name}": value for name, value in changes.items()}
    for name, value in values.items():
        values[name] = "(hidden)" if name in SECRETS and value else redacted_values(value)
    return values


def description_of(name: str) -> str | None:
    """Return the description of a setting; its name is a key of `displayed`."""
    fields = ModelSettings.model_fields if name.startswith(f"{MODELS}.") else Settings.model_fields
    return fields[name.rpartition(".")[2]].description
