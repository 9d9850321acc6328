"""The specification of a deployment.

A value that no platform takes is an error before any platform is asked.
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
    Words,
    own_name,
    whole,
)

Target = Literal["container", "sagemaker", "lambda", "kubernetes", "ray"]
WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+_:=-]*")
TAINT = re.compile(r"[\w./-]+(=[\w.-]*)?(:(NoSchedule|PreferNoSchedule|NoExecute))?", re.ASCII)
SECRET_KEY = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[\w.-]+", re.ASCII)
NEURON, GPU = "neuron", "cuda"
NEURON_INSTANCES = re.compile(r"ml\.(inf2|trn\d)")  # those that torch-neuronx compiles for
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
    value = whole(value)
    if value not in RETENTIONS:
        raise ValueError(
            f"CloudWatch keeps lines for one of {', '.join(map(str, RETENTIONS[1:]))} days; 0"
            " leaves that to the log group"
        )
    return value


Retention = Annotated[int, BeforeValidator(retention)]


class Canary(SpecSection):
    """The new version gets a share of the requests first, and is rolled back if an alarm goes
    off.
    """

    percent: Percent = Field(default=10, ge=1, le=50)
    bake: Annotated[Seconds, Field(ge=0, le=3600)] = 600
    alarms: tuple[str, ...] = (
        "5xx>0",
    )  # `5xx>N` in a minute, `p95>300ms`, `p99>1s`, or the name of an existing alarm


class Autoscaling(SpecSection):
    min: int = Field(default=1, ge=0)
    max: int = Field(default=4, ge=1)
    target: float = Field(
        default=4, gt=0
    )  # requests in flight for each instance, or copy of a component; asynchronous: that wait
    scale_in: Annotated[Seconds, Field(ge=0)] = 300
    scale_out: Annotated[Seconds, Field(ge=0)] = 60

    @model_validator(mode="after")
    def _bounds(self) -> Autoscaling:
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
    concurrency: int | None = Field(default=None, ge=1, le=1000)  # of one instance


class DataCapture(SpecSection):
    percent: Percent = Field(default=100, ge=0, le=100)
    to: str  # s3://bucket/prefix


class Component(SpecSection):
    """An inference component: a model on an endpoint that other models share, with a part of its
    instances for each copy.
    """

    endpoint: str = Field(pattern=r"^[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}$")
    manage_endpoint: bool = (
        True  # false: tsx did not make it, and it is neither created nor changed nor removed
    )
    variant: str = "AllTraffic"  # of an endpoint that is not managed
    memory: int = Field(default=2048, ge=128)  # MB for each copy
    cpus: float | None = Field(default=1, ge=0.25)
    gpus: int | None = Field(default=None, ge=1)
    copies: int = Field(default=1, ge=0)
    min_instances: int = Field(default=0, ge=0)  # of the endpoint
    max_instances: int = Field(default=4, ge=1)

    @model_validator(mode="after")
    def _bounds(self) -> Component:
        if self.manage_endpoint:
            own_name(self.endpoint)
        if self.min_instances > self.max_instances:
            raise ValueError(
                f"min_instances is {self.min_instances}, and max_instances is {self.max_instances}:"
                " it must not be greater"
            )
        return self


class MultiModelEndpoint(SpecSection):
    """One of the models of a multi-model endpoint: SageMaker loads a model from S3 when a request
    names it.
    """

    endpoint: OwnName
    cache: bool = True  # whether a model stays loaded after a request


class SageMaker(SpecSection):
    role: Role | None = None  # ARN of the execution role
    bucket: str | None = None
    bucket_owner: str | None = Field(
        default=None, pattern=ACCOUNT
    )  # the account that the bucket must belong to; by default the own one
    instance_type: str = "ml.c6i.xlarge"
    instances: int = Field(default=1, ge=1)
    startup_timeout: Annotated[Seconds, Field(ge=60, le=3600)] = 600
    download_timeout: Annotated[Seconds, Field(ge=60, le=3600)] = 600
    network_isolation: bool = False
    subnets: Words = ()
    security_groups: Words = ()
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
    results: str | None = Field(
        default=None, pattern=r"^(s3://.+|https://.+|message)$"
    )  # where answers go; `message`: each says it
    results_owner: str | None = Field(
        default=None, pattern=ACCOUNT
    )  # of the bucket of `results`; by default the own account

    @model_validator(mode="after")
    def _window(self) -> Queue:
        if self.batch_size > 10 and (self.window < 1 or self.arn.endswith(".fifo")):
            raise ValueError(
                "more than 10 messages in a batch need a window of at least 1 s and a queue that is"
                " not FIFO"
            )
        return self


class ManagedInstances(SpecSection):
    """Instances in the user's account that Lambda manages: their environments take several requests
    at a time, and can have GPUs.
    """

    provider: str | None = (
        None  # ARN of a capacity provider; without it one is made, of what follows
    )
    subnets: Words = ()
    security_groups: Words = ()
    operator_role: Role | None = None  # ARN of the role by which Lambda manages the instances
    instance_types: Words = ()
    most_cpus: int | None = Field(default=None, ge=2, le=15_000)  # of all instances together
    concurrency: int | None = Field(default=None, ge=1, le=1600)  # of one environment
    memory_per_cpu: float | None = Field(default=None, ge=2, le=8)  # GiB
    gpu_memory: Annotated[Literal[3, 6, 12, 16, 24, 48] | None, BeforeValidator(whole)] = (
        None  # GiB
    )


class LambdaScaling(Autoscaling):
    """Autoscaling of provisioned concurrency."""

    min: int = Field(default=1, ge=1)
    target: float = Field(default=0.7, ge=0.1, le=0.9)  # the share of it that is in use


class Lambda(SpecSection):
    role: Role | None = None  # ARN of the execution role
    memory: int = Field(default=3008, ge=128, le=32_768)  # MiB; the CPU comes with it
    timeout: Annotated[Seconds, Field(ge=1, le=900)] = 60
    storage: int = Field(default=512, ge=512, le=32_768)  # MiB of /tmp
    architecture: Literal["x86_64", "arm64"] = "x86_64"
    subnets: Words = ()
    security_groups: Words = ()
    url: Literal["off", "iam", "public"] = "iam"
    streaming: bool = False
    reserved: int | None = Field(default=None, ge=0)
    provisioned: int | None = Field(default=None, ge=1)
    autoscaling: LambdaScaling | None = None
    queue: Queue | None = None
    managed_instances: ManagedInstances | None = None


class Build(SpecSection):
    """The image that is built if none is given."""

    tool: Literal["auto", "docker", "podman", "buildah"] = "auto"
    base: str | None = (
        None  # image with Python; python:3.X-slim of the Python that runs this command, if not set
    )
    torch: str | None = None  # version of torch; the one that is installed here, if not set
    torch_index: str | None = (
        # package index that torch comes from; PyTorch's own for CPUs, or the usual one where GPUs
        # are asked for
        None
    )
    packages: Words = ()  # of Debian, such as gcc
    extras: Words = ()  # of tsx-serve, such as grpc
    wheel: Path | None = None  # of tsx-serve, in place of this version from the package index

    @field_validator("packages", "extras")
    @classmethod
    def _words(cls, words: tuple[str, ...]) -> tuple[str, ...]:
        for word in words:
            if not WORD.fullmatch(word):
                raise ValueError(f"'{word}' is not the name of a package")
        return words


class Container(SpecSection):
    engine: Literal["auto", "docker", "podman"] = "auto"
    # where it is published; tokens are needed for any other than this machine's own
    host: str = "127.0.0.1"
    port: int = Field(default=8080, ge=1, le=65_535)
    metrics_port: int = Field(default=8082, ge=1, le=65_535)
    gpus: int = Field(default=0, ge=0)
    cpus: float | None = Field(default=None, gt=0)
    memory: str | None = Field(default=None, pattern=r"^[1-9]\d*[mg]$")  # such as 4g
    startup_timeout: Annotated[Seconds, Field(ge=1)] = 600
    grace: Annotated[Seconds, Field(ge=1)] = 30  # from SIGTERM to SIGKILL


class Keda(SpecSection):
    """KEDA scales the pods, by queries to Prometheus, in place of Kubernetes' own autoscaler."""

    prometheus: str = Field(
        pattern=r"^https?://\S+$"
    )  # of its API, as KEDA reaches it, such as http://prometheus.monitoring:9090
    rate_target: float | None = Field(
        default=None, gt=0
    )  # requests a second, for each pod, above which more start
    rate_query: str | None = Field(
        default=None, min_length=1
    )  # PromQL that gives them; without it, the pods' own count
    cooldown: Annotated[Seconds, Field(ge=0)] = (
        300  # without a request, until the last pod is removed
    )


class Kubernetes(SpecSection):
    namespace: str = Field(default="default", pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")
    context: str | None = None  # of kubectl
    replicas: int = Field(default=2, ge=0)
    most_replicas: int = Field(default=8, ge=1)  # as many as `replicas` or fewer: no scaling
    queue_target: int = Field(
        default=4, ge=0
    )  # requests that wait, for each replica, above which more start; 0: only the CPU decides
    cpu_target: int = Field(default=80, ge=1)  # percent of `cpu` in use above which more start
    keda: Keda | None = (
        None  # which with `replicas = 0` removes all pods while there are no requests
    )
    cpu: str = Field(default="2", pattern=r"^[1-9]\d*$|^[1-9]\d*m$")
    memory: str = Field(default="4Gi", pattern=MEMORY)
    disk: str = Field(default="4Gi", pattern=MEMORY)  # of a pod's own: its log, and /tmp
    shared_memory: str = Field(default="1Gi", pattern=MEMORY)  # of /dev/shm, which counts as memory
    gpus: int = Field(default=0, ge=0)
    gpu_resource: str = Field(
        default="nvidia.com/gpu", pattern=r"^[a-z0-9][a-z0-9.-]*/[A-Za-z0-9][\w.-]*$"
    )  # such as a MIG profile's
    node_selector: Labels = Field(default_factory=dict)  # labels of the nodes that it may run on
    # taints of nodes that it may run on all the same, as key, key=value or key=value:effect
    tolerations: Words = ()
    secrets: dict[str, str] = Field(
        default_factory=dict
    )  # environment variable -> SECRET/KEY that it is read from
    # namespaces that may send requests; with one of the two, all others may not
    allow_from: Words = ()
    metrics_from: Words = ()  # namespaces that may read metrics
    # requests must carry one, of `token_secret` or of the Secret NAME-tokens, which is created once
    tokens: bool = True
    token_secret: str | None = None  # an existing Secret with the keys `inference` and `management`
    pull_secret: str | None = None
    grpc: bool | None = (
        # a port for gRPC; if not set, where `build.extras` of an image that is built has `grpc`
        None
    )
    gateway: str | None = Field(
        default=None, pattern=GATEWAY
    )  # NAMESPACE/NAME of a Gateway that an HTTPRoute is attached to
    hostnames: Words = ()  # of that route; without any, all of the Gateway's
    monitoring: bool | None = (
        None  # a ServiceMonitor; if not set, where the cluster has the Prometheus operator
    )
    monitor_labels: Labels = Field(
        default_factory=dict
    )  # by which the operator selects it, such as release = "prometheus"
    startup_timeout: Annotated[Seconds, Field(ge=10)] = 600
    grace: Annotated[Seconds, Field(ge=10)] = 60
    kserve: bool = False  # an InferenceService instead of a Deployment
    protocol: Literal["v1", "v2"] = (
        "v2"  # of KServe: the handler gets what is in `instances`, or the tensors of `inputs`
    )
    storage: str | None = None  # where KServe finds the archive, such as s3://bucket/models/digits

    @field_validator("tolerations")
    @classmethod
    def _taints(cls, taints: tuple[str, ...]) -> tuple[str, ...]:
        for taint in taints:
            if not TAINT.fullmatch(taint):
                raise ValueError(
                    f"'{taint}' is no taint: write key, key=value or key=value:NoSchedule"
                )
        return taints

    @field_validator("secrets")
    @classmethod
    def _keys(cls, secrets: dict[str, str]) -> dict[str, str]:
        for variable, place in secrets.items():
            if not SECRET_KEY.fullmatch(place):
                raise ValueError(
                    f"{variable} is '{place}': write SECRET/KEY, the name of a Secret and the key"
                    " in it"
                )
        return secrets

    @model_validator(mode="after")
    def _scaling(self) -> Kubernetes:
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

    pack: str | None = (
        # the command that packs the archive; without it, the archive is a file of the repository
        None
    )
    branch: str = Field(default="main", pattern=r"^[\w./-]+$")
    environment: str = Field(
        default="production", pattern=r"^[\w.-]+$"
    )  # of GitHub, whose reviewers approve a deployment
    slo: str | None = None  # bounds of the benchmark, such as p99<100ms
    fail_if: Words = (
        "throughput<-10%",
        "p99>20%",
    )  # changes of the benchmark that fail a pull request


class DeploySpec(SpecSection):
    name: OwnName
    target: Target
    model: Path
    region: str | None = Field(default=None, pattern="^[a-z0-9-]+$")
    profile: str | None = None
    image: ImageName | None = None  # one that is built and pushed already
    repository: ImageName | None = None  # where an image that is built here is pushed to
    env: dict[str, str] = Field(default_factory=dict)
    tags: Labels = Field(default_factory=dict)
    create_role: bool = False  # a role to run with is made, with what it needs and no more
    canary: Canary | None = None
    log_retention: Retention = 30  # days that CloudWatch keeps the log of an endpoint or a function
    keep: int = Field(default=5, ge=1)  # earlier versions that can be gone back to
    build: Build = Field(default_factory=Build)
    sagemaker: SageMaker = Field(default_factory=SageMaker)
    lambda_: Lambda = Field(default_factory=Lambda, alias="lambda")
    container: Container = Field(default_factory=Container)
    kubernetes: Kubernetes = Field(default_factory=Kubernetes)
    ray: Ray = Field(default_factory=Ray)
    github: Github = Field(default_factory=Github)

    @property
    def device(self) -> str:
        """Return what the image's torch computes on: AWS's Inferentia2 or Trainium (`neuron`),
        `cuda`, or `cpu`.
        """
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
    def builds_image(self) -> bool:
        """Return whether an image is built; the nodes of Ray are no images of the deployment."""
        return self.image is None and self.target != "ray"
