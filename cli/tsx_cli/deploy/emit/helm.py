"""A Helm chart of a deployment on Kubernetes: its values have the names of `[deploy.kubernetes]`,
in camel case, and their limits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from textwrap import fill, indent
from typing import Any

from pydantic.alias_generators import to_camel

from tsx_cli.common.failure import UsageError
from tsx_cli.deploy.emit.helm_templates import NAME, NAMESPACE, template
from tsx_cli.deploy.emit.yaml_text import yaml_text
from tsx_cli.deploy.engine.facts import Facts, tags_of
from tsx_cli.deploy.image.recipe import UID
from tsx_cli.deploy.kubernetes.resources import (
    Manifest,
    canonical,
    manifests,
    serves_grpc,
    toleration,
)
from tsx_cli.deploy.spec import DeploySpec, Keda, Kubernetes
from tsx_templates.render import render_tree

ELSEWHERE = {"namespace", "context", "kserve", "protocol", "storage"}  # Helm's own, and KServe's
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
VALUES = {  # what values.yaml and its schema say of each
    "image": (
        "The image of the server with its model. Where there are a digest and a tag, the digest"
        " decides."
    ),
    "pullSecret": "The Secret by which the image is pulled.",
    "replicas": (
        "The number of pods: the fewest, where mostReplicas is more. With KEDA it may be 0."
    ),
    "mostReplicas": "The most pods. As many as replicas: no autoscaler.",
    "queueTarget": "Waiting requests for each pod above which more start; 0: they do not count.",
    "cpuTarget": "Percent of cpu in use above which more pods start. KEDA does not use it.",
    "keda": (
        "KEDA instead of Kubernetes' autoscaler: the address of Prometheus, requests a second for"
        " each pod, the query that gives them, and the seconds without a request until the last pod"
        " is removed."
    ),
    "cpu": "Of each pod: requested, without a limit.",
    "memory": "Of each pod: requested, and its limit.",
    "disk": "Of each pod: its log and /tmp.",
    "sharedMemory": "Of each pod: /dev/shm, which counts as memory.",
    "gpus": "GPUs of each pod.",
    "gpuResource": "The resource that gpus counts, such as nvidia.com/gpu or a MIG profile's.",
    "nodeSelector": "Labels of the nodes that pods may run on.",
    "tolerations": "Taints of nodes that pods may run on all the same, as Kubernetes writes them.",
    "env": "Environment variables, as texts.",
    "secrets": "Environment variables from Secrets: SECRET/KEY by the variable's name.",
    "tokens": "Whether requests must carry a token.",
    "tokenSecret": (
        "The Secret with the tokens, under the keys inference and management; without a name it is"
        " NAME-tokens."
    ),
    "grpc": "Whether pods have a port for gRPC, which the image must have.",
    "gateway": (
        "The Gateway that an HTTPRoute is attached to, as NAMESPACE/NAME or NAME; null: no route."
    ),
    "hostnames": "The hosts of the route; without any, those of the Gateway.",
    "allowFrom": (
        "Namespaces that may send requests. With one here or in metricsFrom, all others may not."
    ),
    "metricsFrom": "Namespaces that may read metrics.",
    "monitoring": "Whether to create a ServiceMonitor, which needs the Prometheus operator.",
    "monitorLabels": "Labels by which Prometheus selects the ServiceMonitor.",
    "startupTimeout": "Seconds until a pod must be ready.",
    "grace": "Seconds from SIGTERM to the end of a pod.",
}
CHECKS = {
    "HorizontalPodAutoscaler": (
        """\
{{- if eq (int .Values.replicas) 0 }}
{{- fail "replicas is 0, and Kubernetes' autoscaler keeps at least one pod: set keda.prometheus as well, or replicas to 1" }}
{{- end }}
"""
    ),
    "ScaledObject": (
        """\
{{- if not (or .Values.queueTarget .Values.keda.rateTarget) }}
{{- fail "KEDA has nothing to scale by: set queueTarget, or keda.rateTarget" }}
{{- end }}
{{- if and (eq (int .Values.replicas) 0) (not (and .Values.keda.rateTarget .Values.keda.rateQuery)) }}
{{- fail "replicas is 0, and pods that are not there count no requests: set keda.rateQuery and keda.rateTarget, or replicas to 1" }}
{{- end }}
"""
    ),
}


def chart(spec: DeploySpec, facts: Facts, image: str, names: Mapping[str, str]) -> dict[str, str]:
    """Its files by their paths. `names` are those of the manifests' files. Raises UsageError."""
    if spec.kubernetes.kserve:
        raise UsageError(
            "--emit helm is for a Deployment; for an InferenceService (kubernetes.kserve) use"
            " --emit kubernetes"
        )
    manifests(spec, image, {})  # for its errors
    head = {
        "apiVersion": "v2",
        "name": spec.name,
        "description": f"The model {facts.model_name}, served by tsx",
        "type": "application",
        "version": "0.1.0",
        "appVersion": facts.model_version,
        "annotations": {"tsx/model": f"{facts.model_name}/{facts.model_version}"},
    }
    wanted = values(spec, image)
    text = "\n".join(
        f"{indent(fill(VALUES[key], 118), '# ')}\n{yaml_text([{key: value}])}"
        for key, value in wanted.items()
    )
    found = {
        "Chart.yaml": yaml_text([head]),
        "values.yaml": text,
        "values.schema.json": json.dumps(schema(), indent=2) + "\n",
    }
    static = render_tree(
        "helm", {"name": spec.name, "model": facts.model_name, "uid": UID}, marks="[[ ]]"
    )
    found |= {str(path): text for path, text in static.items()}
    for each in _whole(spec, facts):
        checks = CHECKS.get(each["kind"], "")
        found[f"templates/{names[each['kind']]}"] = template(each, spec.name, checks)
    return found


def values(spec: DeploySpec, image: str) -> dict[str, Any]:
    """In the order of VALUES."""
    own = spec.kubernetes
    found = {
        to_camel(key): value
        for key, value in own.model_dump(mode="json", exclude=ELSEWHERE).items()
    }
    found |= {key: canonical(found[key]) for key in ("cpu", "memory", "disk", "sharedMemory")}
    keda = (
        own.keda.model_dump()
        if own.keda is not None
        else {key: field.default for key, field in Keda.model_fields.items()}
    )
    found["keda"] = {
        to_camel(key): value
        for key, value in (keda | ({} if own.keda else {"prometheus": None})).items()
    }
    found["image"] = image_parts(image)
    found["tolerations"] = [toleration(taint) for taint in own.tolerations]
    found |= {
        "env": dict(spec.env),
        "monitoring": own.monitoring is not False,
        "grpc": serves_grpc(spec),
    }
    return {key: found[key] for key in VALUES}


def image_parts(image: str) -> dict[str, str]:
    named, _, digest = image.partition("@")
    repository, colon, tag = named.rpartition(":")
    if not colon or "/" in tag:  # the port of a registry
        repository, tag = named, ""
    return {"repository": repository, "tag": tag, "digest": digest}


def schema() -> dict[str, Any]:
    """Of values: what the specification takes, and no key that it does not know."""
    keda = _object(Keda.model_json_schema()["properties"])
    keda["properties"]["prometheus"] = {
        "anyOf": [keda["properties"]["prometheus"], {"type": "null"}]
    }
    own = Kubernetes.model_json_schema()["properties"]
    found = _object({key: value for key, value in own.items() if key not in ELSEWHERE})[
        "properties"
    ]
    image = _object({key: {"type": "string"} for key in ("repository", "tag", "digest")})
    image["properties"]["digest"]["pattern"] = "^(sha256:[0-9a-f]{64})?$"
    image["properties"]["repository"]["minLength"] = 1
    found |= {"keda": keda, "image": image | {"required": ["repository"]}, "env": TEXTS}
    found["cpu"] = {"anyOf": [found["cpu"], {"type": "integer", "minimum": 1}]}
    found["tolerations"] = {
        "type": "array",
        "items": _object(
            {key: {"type": "string"} for key in ("key", "operator", "value", "effect")}
        ),
    }
    found["tolerations"]["items"]["properties"]["tolerationSeconds"] = {"type": "integer"}
    whole = _object(
        {key: {"description": VALUES[key], **found[key]} for key in VALUES}
        | {"global": {"type": "object"}}
    )
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values", **whole}


def _object(properties: Mapping[str, Any]) -> dict[str, Any]:
    bounds = {
        "ge": "minimum",
        "le": "maximum",
    }  # which pydantic leaves as they are where a validator comes before them
    plain = {
        to_camel(key): {
            bounds.get(name, name): each
            for name, each in value.items()
            if name not in ("title", "default")
        }
        for key, value in properties.items()
    }
    return {"type": "object", "additionalProperties": False, "properties": plain}


def _whole(spec: DeploySpec, facts: Facts) -> list[Manifest]:
    """The objects with all that is optional in them, each kind once."""
    every: dict[str, Any] = {
        "namespace": NAMESPACE, "replicas": 2, "most_replicas": 3, "gpus": 1, "node_selector": {"label": "value"}, "tolerations": "taint",
        "pull_secret": "secret", "allow_from": "a", "metrics_from": "a", "monitor_labels": {"more": "value"}, "grpc": True,
        "gateway": "namespace/name", "hostnames": "host",
    }  # fmt: skip
    given = {
        "name": NAME,
        "target": "kubernetes",
        "model": spec.model,
        "keep": spec.keep,
        "image": "image",
    }
    labels = {
        key: value
        for key, value in tags_of(spec, facts).items()
        if key not in ("tsx:spec-sha", "tsx:image-digest")
    }
    keda = {"prometheus": "http://prometheus", "rate_target": 1}
    found: dict[str, Manifest] = {}
    for more in ({}, {"keda": keda | {"rate_query": "query"}, "replicas": 0}, {"keda": keda}):
        one = DeploySpec.model_validate({**given, "kubernetes": {**every, **more}})
        made = {each["kind"]: each for each in manifests(one, "image", labels | {"tsx:name": NAME})}
        found = made | found
    found["ScaledObject"]["spec"]["triggers"] = made["ScaledObject"]["spec"][
        "triggers"
    ]  # with the query of the pods
    body = found["Deployment"]["spec"]
    found["Deployment"]["spec"] = {"replicas": 0, **body}
    container = body["template"]["spec"]["containers"][0]
    container["env"] = [
        *(each for each in container["env"] if "resourceFieldRef" in each.get("valueFrom", {})),
        "variables",
        "secrets",
    ]
    return list(found.values())
