"""The specification of a deployment.

A value that no platform accepts is an error before any platform is called.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from tsx_cli.deploy.ray.spec import Ray
from tsx_cli.deploy.spec_values import (
    MEMORY,
    Labels,
    OwnName,
    Percent,
    Role,
    Seconds,
    SpecSection,
    TextList,
    own_name,
    whole_number,
)

Target = Literal["container", "sagemaker", "lambda", "kubernetes", "ray"]
PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+_:=-]*")
TAINT = re.compile(r"[\w./-]+(=[\w.-]*)?(:(NoSchedule|PreferNoSchedule|NoExecute))?", re.ASCII)
SECRET_KEY = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[\w.-]+", re.ASCII)
NEURON, GPU = "neuron", "cuda"
NEURON_INSTANCES = re.compile(r"ml\.(inf2|trn\d)")  # supported by torch-neuronx
ACCELERATED = re.compile(r"ml\.(g\d|gr\d|p\d)")
GATEWAY = r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?/)?[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
ImageName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@-]*$")]
RETENTIONS = (
    0,
    1,
    3,
    5,
    7,
    14,
    30,
    60,
    90,
    120,
    150,
    180,
    365,
    400,
    545,
    731,
    1096,
    1827,
    2192,
    2557,
    2922,
    3288,
    3653,
)
ACCOUNT = r"^\d{12}$"


def retention(value: object) -> object:
    value = whole_number(value)
    if value not in RETENTIONS:
        raise ValueError(
            f"CloudWatch keeps lines for one of {', '.join(map(str, RETENTIONS[1:]))} days; 0"
            " leaves that to the log group"
        )
    return value


Retention = Annotated[int, BeforeValidator(retention)]


class Canary(SpecSection):
    """A release that gives a new version a percentage of the requests first.

    The new version is rolled back if an alarm goes off.
    """

    percent: Percent = Field(default=10, ge=1, le=50)
    bake: Annotated[Seconds, Field(ge=0, le=3600)] = 600
    # `5xx>N` in a minute, `p95>300ms`, `p99>1s`, or the name of an existing alarm.
    alarms: tuple[str, ...] = ("5xx>0",)


class Autoscaling(SpecSection):
    min: int = Field(default=1, ge=0)
    max: int = Field(default=4, ge=1)
    # Requests in flight for each instance or copy; for asynchronous endpoints, waiting requests.
    target: float = Field(default=4, gt=0)
    scale_in: Annotated[Seconds, Field(ge=0)] = 300
    scale_out: Annotated[Seconds, Field(ge=0)] = 60

    @model_validator(mode="after")
    def _check_bounds(self) -> Autoscaling:
        if self.min > self.max:
            raise ValueError(
                f"min is {self.min}, and max is {self.max}: min must not be greater than max"
            )
        return self


class Serverless(SpecSection):
    memory: int = Field(default=4096, ge=1024, le=6144, multiple_of=1024)
    concurrency: int = Field(default=20, ge=1, le=200)
    provisioned: int | None = Field(default=None, ge=1, le=200)


class Asynchronous(SpecSection):
    output: str  # s3://bucket/prefix
    failures: str | None = None
    success_topic: str | None = None
    error_topic: str | None = None
    concurrency: int | None = Field(default=None, ge=1, le=1000)  # requests at a time, per instance


class DataCapture(SpecSection):
    percent: Percent = Field(default=100, ge=0, le=100)
    to: str  # s3://bucket/prefix


class Component(SpecSection):
    """An inference component: a model that has a part of each instance of a shared endpoint."""

    endpoint: str = Field(pattern=r"^[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}$")
    manage_endpoint: bool = True  # whether tsx creates, changes and removes the endpoint
    variant: str = "AllTraffic"  # variant of an endpoint that is not managed
    memory: int = Field(default=2048, ge=128)  # MB for each copy
    cpus: float | None = Field(default=1, ge=0.25)
    gpus: int | None = Field(default=None, ge=1)
    copies: int = Field(default=1, ge=0)
    min_instances: int = Field(default=0, ge=0)  # instances of the endpoint
    max_instances: int = Field(default=4, ge=1)

    @model_validator(mode="after")
    def _check_bounds(self) -> Component:
        if self.manage_endpoint:
            own_name(self.endpoint)
        if self.min_instances > self.max_instances:
            raise ValueError(
                f"min_instances is {self.min_instances}, and max_instances is {self.max_instances}:"
                " it must not be greater"
            )
        return self


class MultiModelEndpoint(SpecSection):
    """A model of a multi-model endpoint: SageMaker loads it from S3 when a request names it."""

    endpoint: OwnName
    cache: bool = True  # whether a model stays loaded after a request


class SageMaker(SpecSection):
    role: Role | None = None  # ARN of the execution role
    bucket: str | None = None
    # The account that must own the bucket; by default the deploying account.
    bucket_owner: str | None = Field(default=None, pattern=ACCOUNT)
    instance_type: str = "ml.c6i.xlarge"
    instances: int = Field(default=1, ge=1)
    startup_timeout: Annotated[Seconds, Field(ge=60, le=3600)] = 600
    download_timeout: Annotated[Seconds, Field(ge=60, le=3600)] = 600
    network_isolation: bool = False
    subnets: TextList = ()
    security_groups: TextList = ()
    kms_key: str | None = None
    ami: str | None = None
    routing: Literal["LEAST_OUTSTANDING_REQUESTS", "RANDOM"] = "LEAST_OUTSTANDING_REQUESTS"
    serverless: Serverless | None = None
    asynchronous: Asynchronous | None = None
    autoscaling: Autoscaling | None = None
    data_capture: DataCapture | None = None
    component: Component | None = None
    multi_model: MultiModelEndpoint | None = None


class Queue(SpecSection):
    """An SQS queue whose messages are the function's requests."""

    arn: str = Field(pattern=r"^arn:aws[a-z-]*:sqs:[a-z0-9-]+:\d+:[\w-]+(\.fifo)?$")
    batch_size: int = Field(default=10, ge=1, le=10_000)
    window: Annotated[Seconds, Field(ge=0, le=300)] = 1
    concurrency: int | None = Field(default=None, ge=2, le=1000)
    # The destination of responses; `message`: each message names its own.
    results: str | None = Field(default=None, pattern=r"^(s3://.+|https://.+|message)$")
    # The owner of the bucket of `results`; by default the deploying account.
    results_owner: str | None = Field(default=None, pattern=ACCOUNT)

    @model_validator(mode="after")
    def _check_window(self) -> Queue:
        if self.batch_size > 10 and (self.window < 1 or self.arn.endswith(".fifo")):
            raise ValueError(
                "more than 10 messages in a batch need a window of at least 1 s and a queue that is"
                " not FIFO"
            )
        return self


class ManagedInstances(SpecSection):
    """Instances in the user's account that Lambda manages.

    Their environments take several requests at a time, and can have GPUs.
    """

    provider: str | None = None  # ARN of a capacity provider; by default one is created
    subnets: TextList = ()
    security_groups: TextList = ()
    operator_role: Role | None = None  # ARN of the role with which Lambda manages the instances
    instance_types: TextList = ()
    most_cpus: int | None = Field(default=None, ge=2, le=15_000)  # CPUs of all instances
    # Requests at a time, per environment.
    concurrency: int | None = Field(default=None, ge=1, le=1600)
    memory_per_cpu: float | None = Field(default=None, ge=2, le=8)  # GiB
    # GiB of a GPU
    gpu_memory: Annotated[Literal[3, 6, 12, 16, 24, 48] | None, BeforeValidator(whole_number)] = (
        None
    )


class LambdaScaling(Autoscaling):
    """Autoscaling of provisioned concurrency."""

    min: int = Field(default=1, ge=1)
    # Fraction of the provisioned concurrency in use.
    target: float = Field(default=0.7, ge=0.1, le=0.9)


class Lambda(SpecSection):
    role: Role | None = None  # ARN of the execution role
    memory: int = Field(default=3008, ge=128, le=32_768)  # MiB; Lambda derives the CPU from it
    timeout: Annotated[Seconds, Field(ge=1, le=900)] = 60
    storage: int = Field(default=512, ge=512, le=32_768)  # MiB of /tmp
    architecture: Literal["x86_64", "arm64"] = "x86_64"
    subnets: TextList = ()
    security_groups: TextList = ()
    url: Literal["off", "iam", "public"] = "iam"
    streaming: bool = False
    reserved: int | None = Field(default=None, ge=0)
    provisioned: int | None = Field(default=None, ge=1)
    autoscaling: LambdaScaling | None = None
    queue: Queue | None = None
    managed_instances: ManagedInstances | None = None


class Build(SpecSection):
    """The settings of an image's build, if no image is given."""

    tool: Literal["auto", "docker", "podman", "buildah"] = "auto"
    base: str | None = None  # image with Python; by default python:3.X-slim with this Python's X
    torch: str | None = None  # version of torch; by default the installed one
    # Package index of torch; by default PyTorch's index for CPUs, or PyPI for GPUs.
    torch_index: str | None = None
    packages: TextList = ()  # Debian packages, such as gcc
    extras: TextList = ()  # extras of tsx-serve, such as grpc
    wheel: Path | None = None  # wheel of tsx-serve, in place of the package index

    @field_validator("packages", "extras")
    @classmethod
    def _check_packages(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if not PACKAGE.fullmatch(name):
                raise ValueError(f"'{name}' is not the name of a package")
        return names


class Container(SpecSection):
    engine: Literal["auto", "docker", "podman"] = "auto"
    host: str = "127.0.0.1"  # published address; all but loopback addresses need tokens
    port: int = Field(default=8080, ge=1, le=65_535)
    metrics_port: int = Field(default=8082, ge=1, le=65_535)
    gpus: int = Field(default=0, ge=0)
    cpus: float | None = Field(default=None, gt=0)
    memory: str | None = Field(default=None, pattern=r"^[1-9]\d*[mg]$")  # such as 4g
    startup_timeout: Annotated[Seconds, Field(ge=1)] = 600
    grace: Annotated[Seconds, Field(ge=1)] = 30  # seconds between SIGTERM and SIGKILL


class Keda(SpecSection):
    """Scaling by KEDA with queries to Prometheus, in place of Kubernetes' own autoscaler."""

    # The address of Prometheus for KEDA, such as http://prometheus.monitoring:9090.
    prometheus: str = Field(pattern=r"^https?://\S+$")
    # Requests per second and pod above which more pods start.
    rate_target: float | None = Field(default=None, gt=0)
    # PromQL query for this rate; by default the rate that the pods count.
    rate_query: str | None = Field(default=None, min_length=1)
    # Seconds without a request until the last pod is removed.
    cooldown: Annotated[Seconds, Field(ge=0)] = 300


class Kubernetes(SpecSection):
    namespace: str = Field(default="default", pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")
    context: str | None = None  # context of kubectl
    replicas: int = Field(default=2, ge=0)
    most_replicas: int = Field(default=8, ge=1)  # scaling is off if it is not above `replicas`
    # Waiting requests for each replica above which more start; 0: only the CPU decides.
    queue_target: int = Field(default=4, ge=0)
    cpu_target: int = Field(default=80, ge=1)  # used percentage of `cpu` above which more start
    # KEDA with `replicas = 0` removes all pods while there are no requests.
    keda: Keda | None = None
    cpu: str = Field(default="2", pattern=r"^[1-9]\d*$|^[1-9]\d*m$")
    memory: str = Field(default="4Gi", pattern=MEMORY)
    disk: str = Field(default="4Gi", pattern=MEMORY)  # disk of a pod: its log, and /tmp
    shared_memory: str = Field(default="1Gi", pattern=MEMORY)  # /dev/shm, which counts as memory
    gpus: int = Field(default=0, ge=0)
    # The resource name of the GPUs, for instance of a MIG profile.
    gpu_resource: str = Field(
        default="nvidia.com/gpu", pattern=r"^[a-z0-9][a-z0-9.-]*/[A-Za-z0-9][\w.-]*$"
    )
    node_selector: Labels = Field(default_factory=dict)  # labels of the allowed nodes
    tolerations: TextList = ()  # tolerated taints, as key, key=value or key=value:effect
    secrets: dict[str, str] = Field(default_factory=dict)  # environment variable -> SECRET/KEY
    # Namespaces that may send requests or read metrics; a set list excludes all other namespaces.
    allow_from: TextList = ()
    metrics_from: TextList = ()
    # Whether requests need a token from `token_secret`, or from the Secret NAME-tokens, which the
    # first deployment creates.
    tokens: bool = True
    token_secret: str | None = None  # an existing Secret with the keys `inference` and `management`
    pull_secret: str | None = None
    grpc: bool | None = None  # whether there is a gRPC port; by default if an extra is `grpc`
    # NAMESPACE/NAME of the Gateway for an HTTPRoute.
    gateway: str | None = Field(default=None, pattern=GATEWAY)
    hostnames: TextList = ()  # hosts of the route; by default all hosts of the Gateway
    # Whether there is a ServiceMonitor; by default if the cluster has the Prometheus operator.
    monitoring: bool | None = None
    # Labels by which the operator selects the monitor, such as release = "prometheus".
    monitor_labels: Labels = Field(default_factory=dict)
    startup_timeout: Annotated[Seconds, Field(ge=10)] = 600
    grace: Annotated[Seconds, Field(ge=10)] = 60
    kserve: bool = False  # whether to create an InferenceService in place of a Deployment
    # KServe's protocol: the handler gets the `instances` of v1, or the tensors `inputs` of v2.
    protocol: Literal["v1", "v2"] = "v2"
    storage: str | None = None  # the archive for KServe, such as s3://bucket/models/digits

    @field_validator("tolerations")
    @classmethod
    def _check_taints(cls, taints: tuple[str, ...]) -> tuple[str, ...]:
        for taint in taints:
            if not TAINT.fullmatch(taint):
                raise ValueError(
                    f"'{taint}' is no taint: write key, key=value or key=value:NoSchedule"
                )
        return taints

    @field_validator("secrets")
    @classmethod
    def _check_secrets(cls, secrets: dict[str, str]) -> dict[str, str]:
        for variable, secret_key in secrets.items():
            if not SECRET_KEY.fullmatch(secret_key):
                raise ValueError(
                    f"{variable} is '{secret_key}': write SECRET/KEY, the name of a Secret and the"
                    " key in it"
                )
        return secrets

    @model_validator(mode="after")
    def _check_scaling(self) -> Kubernetes:
        if self.keda is None:
            if self.replicas == 0 and self.most_replicas > 1 and not self.kserve:
                raise ValueError(
                    "replicas is 0, and Kubernetes' autoscaler keeps at least one pod: set keda as"
                    " well, or replicas to 1"
                )
            return self
        if not self.queue_target and self.keda.rate_target is None:
            raise ValueError("keda has nothing to scale by: set queue_target, or keda.rate_target")
        if self.replicas > self.most_replicas:
            raise ValueError(
                f"replicas is {self.replicas}, and most_replicas is {self.most_replicas}: KEDA"
                " takes no range from more to less"
            )
        if self.replicas == 0 and (self.keda.rate_query is None or self.keda.rate_target is None):
            raise ValueError(
                "replicas is 0, and pods that are not there count no requests: set keda.rate_query"
                " to a query of what is in front of them, such as the gateway's requests a second,"
                " and keda.rate_target; or set replicas to 1"
            )
        return self


class Github(SpecSection):
    """The workflow of `--emit github`."""

    # The command that packs the archive; by default the archive is a file of the repository.
    pack: str | None = None
    branch: str = Field(default="main", pattern=r"^[\w./-]+$")
    # The environment of GitHub whose reviewers approve a deployment.
    environment: str = Field(default="production", pattern=r"^[\w.-]+$")
    slo: str | None = None  # bounds of the benchmark, such as p99<100ms
    # Changes of the benchmark that make a pull request fail.
    fail_if: TextList = ("throughput<-10%", "p99>20%")


class DeploySpec(SpecSection):
    name: OwnName
    target: Target
    model: Path
    region: str | None = Field(default=None, pattern="^[a-z0-9-]+$")
    profile: str | None = None
    image: ImageName | None = None  # an image that is already pushed
    repository: ImageName | None = None  # the repository to which a built image is pushed
    env: dict[str, str] = Field(default_factory=dict)
    tags: Labels = Field(default_factory=dict)
    create_role: bool = False  # whether to create the execution role
    canary: Canary | None = None
    log_retention: Retention = 30  # days that CloudWatch keeps the log
    keep: int = Field(default=5, ge=1)  # number of versions that are kept for rollbacks
    build: Build = Field(default_factory=Build)
    sagemaker: SageMaker = Field(default_factory=SageMaker)
    lambda_: Lambda = Field(default_factory=Lambda, alias="lambda")
    container: Container = Field(default_factory=Container)
    kubernetes: Kubernetes = Field(default_factory=Kubernetes)
    ray: Ray = Field(default_factory=Ray)
    github: Github = Field(default_factory=Github)

    @property
    def device(self) -> str:
        """The device of the image's torch: `neuron` (Inferentia2, Trainium), `cuda` or `cpu`."""
        pods, managed = self.kubernetes, self.lambda_.managed_instances
        if self.target == "sagemaker":
            kind = "" if self.sagemaker.serverless else self.sagemaker.instance_type
            return (
                NEURON
                if NEURON_INSTANCES.match(kind)
                else GPU
                if ACCELERATED.match(kind)
                else "cpu"
            )
        if (
            self.target == "kubernetes"
            and pods.gpus
            and pods.gpu_resource.startswith("aws.amazon.com/neuron")
        ):
            return NEURON
        gpus = {
            "container": self.container.gpus,
            "kubernetes": pods.gpus,
            "lambda": managed and managed.gpu_memory,
        }
        return GPU if gpus.get(self.target) else "cpu"

    @property
    def names_only(self) -> bool:
        """Whether it only names an existing deployment and its location, for most verbs."""
        return "model" not in self.model_fields_set

    @property
    def builds_image(self) -> bool:
        """Whether the deployment builds an image; the images of Ray nodes belong to the cluster."""
        return self.image is None and self.target != "ray"
