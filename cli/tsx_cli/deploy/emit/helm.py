"""A Helm chart of a deployment on Kubernetes.

Its values have the names and the limits of `[deploy.kubernetes]`, in camel case.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from textwrap import fill, indent
from typing import Any

from pydantic.alias_generators import to_camel

from tsx_cli.common.failure import UsageError
from tsx_cli.deploy.emit.helm_templates import NAME, NAMESPACE, render_template
from tsx_cli.deploy.emit.yaml_text import yaml_text
from tsx_cli.deploy.engine.facts import Facts, tags_of
from tsx_cli.deploy.image.recipe import UID
from tsx_cli.deploy.kubernetes.resources import (
    Manifest,
    canonical,
    has_grpc_port,
    manifests,
    toleration,
)
from tsx_cli.deploy.spec import DeploySpec, Keda, Kubernetes
from tsx_templates.render import render_tree

# Keys that Helm decides, or that apply only to KServe.
OMITTED_KEYS = {"namespace", "context", "kserve", "protocol", "storage"}
STRING_MAP = {"type": "object", "additionalProperties": {"type": "string"}}
VALUE_DESCRIPTIONS = {  # descriptions in values.yaml and its schema
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
    """Return the files of the chart by their paths.

    Args:
        spec: The specification.
        facts: The facts of the archive.
        image: The name of the image.
        names: The file names of the manifests, by kind.

    Raises:
        UsageError: The deployment would fail, or it uses KServe.
    """
    if spec.kubernetes.kserve:
        raise UsageError(
            "--emit helm is for a Deployment; for an InferenceService (kubernetes.kserve) use"
            " --emit kubernetes"
        )
    manifests(spec, image, {})  # This raises errors of the specification.
    metadata = {
        "apiVersion": "v2",
        "name": spec.name,
        "description": f"The model {facts.model_name}, served by tsx",
        "type": "application",
        "version": "0.1.0",
        "appVersion": facts.model_version,
        "annotations": {"tsx/model": f"{facts.model_name}/{facts.model_version}"},
    }
    chart_values = values(spec, image)
    text = "\n".join(
        f"{indent(fill(VALUE_DESCRIPTIONS[key], 118), '# ')}\n{yaml_text([{key: value}])}"
        for key, value in chart_values.items()
    )
    files = {
        "Chart.yaml": yaml_text([metadata]),
        "values.yaml": text,
        "values.schema.json": json.dumps(schema(), indent=2) + "\n",
    }
    static_files = render_tree(
        "helm", {"name": spec.name, "model": facts.model_name, "uid": UID}, marks="[[ ]]"
    )
    files |= {str(path): text for path, text in static_files.items()}
    for manifest in _all_manifests(spec, facts):
        checks = CHECKS.get(manifest["kind"], "")
        files[f"templates/{names[manifest['kind']]}"] = render_template(manifest, spec.name, checks)
    return files


def values(spec: DeploySpec, image: str) -> dict[str, Any]:
    """Return the values of the chart, in the order of VALUE_DESCRIPTIONS."""
    settings = spec.kubernetes
    values_by_key = {
        to_camel(key): value
        for key, value in settings.model_dump(mode="json", exclude=OMITTED_KEYS).items()
    }
    values_by_key |= {
        key: canonical(values_by_key[key]) for key in ("cpu", "memory", "disk", "sharedMemory")
    }
    keda = (
        settings.keda.model_dump()
        if settings.keda is not None
        else {key: field.default for key, field in Keda.model_fields.items()}
    )
    values_by_key["keda"] = {
        to_camel(key): value
        for key, value in (keda | ({} if settings.keda else {"prometheus": None})).items()
    }
    values_by_key["image"] = image_parts(image)
    values_by_key["tolerations"] = [toleration(taint) for taint in settings.tolerations]
    values_by_key |= {
        "env": dict(spec.env),
        "monitoring": settings.monitoring is not False,
        "grpc": has_grpc_port(spec),
    }
    return {key: values_by_key[key] for key in VALUE_DESCRIPTIONS}


def image_parts(image: str) -> dict[str, str]:
    name, _, digest = image.partition("@")
    repository, colon, tag = name.rpartition(":")
    if not colon or "/" in tag:  # The colon precedes a port.
        repository, tag = name, ""
    return {"repository": repository, "tag": tag, "digest": digest}


def schema() -> dict[str, Any]:
    """Return the JSON schema of the values, which refuses unknown keys."""
    keda = _object(Keda.model_json_schema()["properties"])
    keda["properties"]["prometheus"] = {
        "anyOf": [keda["properties"]["prometheus"], {"type": "null"}]
    }
    all_properties = Kubernetes.model_json_schema()["properties"]
    properties = _object(
        {key: value for key, value in all_properties.items() if key not in OMITTED_KEYS}
    )["properties"]
    image = _object({key: {"type": "string"} for key in ("repository", "tag", "digest")})
    image["properties"]["digest"]["pattern"] = "^(sha256:[0-9a-f]{64})?$"
    image["properties"]["repository"]["minLength"] = 1
    properties |= {"keda": keda, "image": image | {"required": ["repository"]}, "env": STRING_MAP}
    properties["cpu"] = {"anyOf": [properties["cpu"], {"type": "integer", "minimum": 1}]}
    properties["tolerations"] = {
        "type": "array",
        "items": _object(
            {key: {"type": "string"} for key in ("key", "operator", "value", "effect")}
        ),
    }
    properties["tolerations"]["items"]["properties"]["tolerationSeconds"] = {"type": "integer"}
    values = _object(
        {
            key: {"description": VALUE_DESCRIPTIONS[key], **properties[key]}
            for key in VALUE_DESCRIPTIONS
        }
        | {"global": {"type": "object"}}
    )
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values", **values}


def _object(properties: Mapping[str, Any]) -> dict[str, Any]:
    # pydantic does not convert its names of limits if a validator precedes them.
    keywords = {"ge": "minimum", "le": "maximum"}
    json_properties = {
        to_camel(key): {
            keywords.get(name, name): argument
            for name, argument in value.items()
            if name not in ("title", "default")
        }
        for key, value in properties.items()
    }
    return {"type": "object", "additionalProperties": False, "properties": json_properties}


def _all_manifests(spec: DeploySpec, facts: Facts) -> list[Manifest]:
    """Return one manifest of each kind, with all optional parts."""
    all_settings: dict[str, Any] = {
        "namespace": NAMESPACE, "replicas": 2, "most_replicas": 3, "gpus": 1, "node_selector": {"label": "value"}, "tolerations": "taint",
        "pull_secret": "secret", "allow_from": "a", "metrics_from": "a", "monitor_labels": {"more": "value"}, "grpc": True,
        "gateway": "namespace/name", "hostnames": "host",
    }  # fmt: skip
    base = {
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
    objects: dict[str, Manifest] = {}
    for variant_settings in (
        {},
        {"keda": keda | {"rate_query": "query"}, "replicas": 0},
        {"keda": keda},
    ):
        variant = DeploySpec.model_validate(
            {**base, "kubernetes": {**all_settings, **variant_settings}}
        )
        variant_objects = {
            manifest["kind"]: manifest
            for manifest in manifests(variant, "image", labels | {"tsx:name": NAME})
        }
        objects = variant_objects | objects
    # The last variant has the default query, which counts the requests of the pods.
    scaled_object = variant_objects["ScaledObject"]
    objects["ScaledObject"]["spec"]["triggers"] = scaled_object["spec"]["triggers"]
    body = objects["Deployment"]["spec"]
    objects["Deployment"]["spec"] = {"replicas": 0, **body}
    container = body["template"]["spec"]["containers"][0]
    container["env"] = [
        *(
            manifest
            for manifest in container["env"]
            if "resourceFieldRef" in manifest.get("valueFrom", {})
        ),
        "variables",
        "secrets",
    ]
    return list(objects.values())
