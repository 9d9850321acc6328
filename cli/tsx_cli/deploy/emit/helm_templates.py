"""The templates of a Helm chart: the manifests of `tsx deploy`, with Helm's expressions where an
environment may differ.

A manifest is made with all optional parts in it. Each entry of PLACES then says of one field, by
its path, what stands there: `if CONDITION` or `if CONDITION then VALUE` puts it under a condition,
several lines take its place, and anything else is its value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tsx_cli.deploy.emit.yaml_text import yaml_text
from tsx_cli.deploy.kubernetes.resources import Manifest

Places = Mapping[str, str]
RELEASE = {
    "the-release-name": "{{ .Release.Name }}",
    "namespace-of-the-release": "{{ .Release.Namespace }}",
}  # that manifests are made with
NAME, NAMESPACE = RELEASE
TOKEN = re.compile(
    r"^( *)(- (?=TSX\d+X: null))?(?:- )?(TSX\d+X)(?:: null)?$|(TSX\d+X)", re.MULTILINE
)  # lines of its own, or a value
# only Chart.yaml holds the archive's name
MODEL = '{{ index .Chart.Annotations "tsx/model" | toJson }}'
OWNER = {
    "metadata labels app.kubernetes.io/managed-by": "{{ .Release.Service }}",
    "metadata annotations tsx/model": MODEL,
}
POD = "spec template spec"
CONTAINER = f"{POD} containers 0"
VARIABLES = """
{{- $grace := int .Values.grace }}
{{- $times := printf "shutdown_delay=%d drain_timeout=%d" (min 5 (div $grace 4)) (max 1 (sub $grace 10)) }}
{{- $defaults := list $times (printf "default_startup_timeout=%d" (int .Values.startupTimeout)) }}
{{- if .Values.grpc }}{{ $defaults = append $defaults "grpc_inference_address=0.0.0.0" }}{{ end }}
{{- if not .Values.tokens }}{{ $defaults = append $defaults "disable_token_authorization=true" }}{{ end }}
{{- range $name, $value := merge (dict) .Values.env (dict "TSX_DEFAULTS" (join " " $defaults)) }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}"""
SECRETS = """
{{- range $name, $place := include "CHART.secrets" . | fromYaml }}
- name: {{ $name }}
  valueFrom:
    secretKeyRef:
      name: {{ splitList "/" $place | first | quote }}
      key: {{ splitList "/" $place | last | quote }}
{{- end }}"""
AUTHORIZATION = """
{{- $place := get (include "CHART.secrets" . | fromYaml) "TSX_MANAGEMENT_TOKEN" }}
{{- if and $place (not (include "CHART.open" .)) }}
authorization:
  type: Bearer
  credentials:
    name: {{ splitList "/" $place | first | quote }}
    key: {{ splitList "/" $place | last | quote }}
{{- end }}"""
HOSTNAMES = """
{{- with .Values.hostnames }}
hostnames:
  {{- toYaml . | nindent 4 }}
{{- end }}"""
GATEWAY = '{{ splitList "/" .Values.gateway | PART | quote }}'
TOLERATIONS = """
{{- if or .Values.gpus .Values.tolerations }}
tolerations:
  {{- if .Values.gpus }}
  - key: {{ splitList "/" .Values.gpuResource | first }}/{{ ternary "neuron" "gpu" (hasPrefix "aws.amazon.com/" .Values.gpuResource) }}
    operator: Exists
  {{- end }}
  {{- with .Values.tolerations }}
  {{- toYaml . | nindent 8 }}
  {{- end }}
{{- end }}"""
GPUS = """
{{- if .Values.gpus }}
{{ .Values.gpuResource }}: {{ .Values.gpus | quote }}
{{- end }}"""
NODES = """
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 8 }}
{{- end }}"""
FROM = """
from:
  {{- range .Values.VALUE }}
  - namespaceSelector:
      matchLabels:
        kubernetes.io/metadata.name: {{ . | quote }}
  {{- end }}"""
LABELS = """
{{- with omit .Values.monitorLabels "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/managed-by" }}
{{- toYaml . | nindent 4 }}
{{- end }}"""
PLACES: Mapping[str, Places] = {
    "Deployment": {
        "spec replicas": 'if not (include "CHART.scales" .) then {{ int .Values.replicas }}',
        "spec progressDeadlineSeconds": "{{ add .Values.startupTimeout 60 }}",
        "spec template metadata labels app.kubernetes.io/managed-by": "{{ .Release.Service }}",
        "spec template metadata annotations tsx/model": MODEL,
        f"{POD} terminationGracePeriodSeconds": "{{ int .Values.grace }}",
        f"{POD} volumes 0 emptyDir sizeLimit": "{{ .Values.disk }}",
        f"{POD} volumes 1 emptyDir sizeLimit": "{{ .Values.sharedMemory }}",
        f"{POD} nodeSelector": NODES,
        f"{POD} tolerations": TOLERATIONS,
        f"{POD} imagePullSecrets": "if .Values.pullSecret",
        f"{POD} imagePullSecrets 0 name": "{{ .Values.pullSecret | quote }}",
        f"{CONTAINER} ports 1": "if .Values.grpc",
        f"{CONTAINER} image": '{{ include "CHART.image" . | quote }}',
        f"{CONTAINER} env 0": 'if not (hasKey .Values.env "TSX_CPUS")',
        f"{CONTAINER} env 1": VARIABLES,
        f"{CONTAINER} env 2": SECRETS,
        **{
            f"{CONTAINER} resources {bound} {key}": f"{{{{ .Values.{value} }}}}"
            for bound in ("requests", "limits")
            for key, value in (("memory", "memory"), ("ephemeral-storage", "disk"))
        },
        f"{CONTAINER} resources requests cpu": "{{ .Values.cpu | quote }}",
        f"{CONTAINER} resources limits nvidia.com/gpu": GPUS,
        f"{CONTAINER} startupProbe failureThreshold": "{{ div (add .Values.startupTimeout 4) 5 }}",
    },
    "Service": {"spec ports 1": "if .Values.grpc"},
    "HorizontalPodAutoscaler": {
        "": 'if and (include "CHART.scales" .) (not .Values.keda.prometheus)',
        "spec minReplicas": "{{ max 1 (int .Values.replicas) }}",
        "spec maxReplicas": "{{ int .Values.mostReplicas }}",
        "spec metrics 0": "if .Values.queueTarget",
        "spec metrics 0 pods target averageValue": "{{ .Values.queueTarget | quote }}",
        "spec metrics 1 resource target averageUtilization": "{{ int .Values.cpuTarget }}",
    },
    "ScaledObject": {
        "": "if .Values.keda.prometheus",
        "spec cooldownPeriod": "{{ int .Values.keda.cooldown }}",
        "spec minReplicaCount": "{{ int .Values.replicas }}",
        "spec maxReplicaCount": "{{ int .Values.mostReplicas }}",
        "spec triggers 0": "if .Values.queueTarget",
        "spec triggers 0 metadata serverAddress": "{{ .Values.keda.prometheus | quote }}",
        "spec triggers 0 metadata threshold": "{{ .Values.queueTarget | quote }}",
        "spec triggers 1": "if .Values.keda.rateTarget",
        "spec triggers 1 metadata serverAddress": "{{ .Values.keda.prometheus | quote }}",
        "spec triggers 1 metadata query": (
            "{{ with .Values.keda.rateQuery }}{{ . | quote }}{{ else }}ITSELF{{ end }}"
        ),
        "spec triggers 1 metadata threshold": "{{ .Values.keda.rateTarget | quote }}",
        "spec initialCooldownPeriod": (
            "if eq (int .Values.replicas) 0 then {{ int .Values.keda.cooldown }}"
        ),
        "spec fallback": "if eq (int .Values.replicas) 0",
    },
    "PodDisruptionBudget": {"": "if gt (int .Values.replicas) 1"},
    "NetworkPolicy": {
        "": "if or .Values.allowFrom .Values.metricsFrom",
        "spec ingress 0": "if .Values.allowFrom",
        "spec ingress 0 ports 1": "if .Values.grpc",
        "spec ingress 0 from": FROM.replace("VALUE", "allowFrom"),
        "spec ingress 1": "if .Values.metricsFrom",
        "spec ingress 1 from": FROM.replace("VALUE", "metricsFrom"),
    },
    "ServiceMonitor": {
        "": "if .Values.monitoring",
        "metadata labels more": LABELS,
        "spec endpoints 0 authorization": AUTHORIZATION,
    },
    "HTTPRoute": {
        "": "if .Values.gateway",
        "spec parentRefs 0 name": GATEWAY.replace("PART", "last"),
        "spec parentRefs 0 namespace": (
            '{{ if contains "/" .Values.gateway }}'
            + GATEWAY.replace("PART", "first")
            + "{{ else }}{{ .Release.Namespace }}{{ end }}"
        ),
        "spec hostnames": HOSTNAMES,
    },
}


def template(manifest: Manifest, chart: str, checks: str = "") -> str:
    """The text of a chart's template.

    `checks` is what comes before all else, where the object is wanted.
    """
    places = {**OWNER, **PLACES[manifest["kind"]]}
    texts: dict[str, str] = {}

    def token(text: str) -> str:
        name = f"TSX{len(texts)}X"
        texts[name] = text
        return name

    def field(path: str, key: str | None, value: Any) -> list[tuple[str | None, Any]]:
        """The keys and values that stand for one field; of a list, what has no key is an item."""
        place = places.pop(path, "")
        if "\n" in place:
            return [(token(place.strip("\n")), None)]
        condition, _, text = (
            place.removeprefix("if ").partition(" then ")
            if place.startswith("if ")
            else ("", "", place)
        )
        own = (
            key,
            token(text.replace("ITSELF", str(value))) if text else walked(f"{path} ", value),
        )
        return (
            [(token(f"{{{{- if {condition} }}}}"), None), own, (token("{{- end }}"), None)]
            if condition
            else [own]
        )

    def walked(above: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return dict(
                pair for key, each in value.items() for pair in field(f"{above}{key}", key, each)
            )
        if isinstance(value, (list, tuple)):
            pairs = [
                pair
                for place, each in enumerate(value)
                for pair in field(f"{above}{place}", None, each)
            ]
            return [each if key is None else key for key, each in pairs]
        return value

    whole = places.pop("", "")
    text = yaml_text([walked("", manifest)])
    if places:
        raise KeyError(f"the {manifest['kind']} has no {', '.join(places)}")

    def put(found: re.Match[str]) -> str:
        if found[4]:
            return texts[found[4]]
        first, *others = texts[found[3]].splitlines()
        indent, dash = found[1], found[2] or ""  # of an item that begins with these lines
        return "\n".join(
            [f"{indent}{dash}{first}", *(f"{indent}{' ' * len(dash)}{line}" for line in others)]
        )

    text = TOKEN.sub(put, text)
    for name, expression in RELEASE.items():
        text = text.replace(name, expression)
    if whole:
        text = f"{{{{- {whole} }}}}\n{checks}{text}{{{{- end }}}}\n"
    return text.replace("CHART", chart)
