"""The templates of a Helm chart: manifests with Helm's expressions in place of some values.

A manifest is first built with all optional parts. FIELD_EXPRESSIONS then maps the paths of fields
to expressions. `if CONDITION` or `if CONDITION then VALUE` puts a field under a condition. Several
lines replace the field, and any other expression is its value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tsx_cli.deploy.emit.yaml_text import yaml_text
from tsx_cli.deploy.kubernetes.resources import Manifest

FieldExpressions = Mapping[str, str]
# Placeholders in the manifests.
RELEASE = {
    "the-release-name": "{{ .Release.Name }}",
    "namespace-of-the-release": "{{ .Release.Namespace }}",
}
NAME, NAMESPACE = RELEASE
# A token that stands for whole lines, or for a value.
TOKEN = re.compile(
    r"^( *)(- (?=TSX\d+X: null))?(?:- )?(TSX\d+X)(?:: null)?$|(TSX\d+X)", re.MULTILINE
)
# Only Chart.yaml contains the name of the archive, so the templates read it from there.
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
INGRESS_PEERS = """
from:
  {{- range .Values.VALUE }}
  - namespaceSelector:
      matchLabels:
        kubernetes.io/metadata.name: {{ . | quote }}
  {{- end }}"""
MONITOR_LABELS = """
{{- with omit .Values.monitorLabels "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/managed-by" }}
{{- toYaml . | nindent 4 }}
{{- end }}"""
FIELD_EXPRESSIONS: Mapping[str, FieldExpressions] = {
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
        "spec ingress 0 from": INGRESS_PEERS.replace("VALUE", "allowFrom"),
        "spec ingress 1": "if .Values.metricsFrom",
        "spec ingress 1 from": INGRESS_PEERS.replace("VALUE", "metricsFrom"),
    },
    "ServiceMonitor": {
        "": "if .Values.monitoring",
        "metadata labels more": MONITOR_LABELS,
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


def render_template(manifest: Manifest, chart: str, checks: str = "") -> str:
    """Return the text of a template of the chart.

    Args:
        manifest: The object, with all optional parts.
        chart: The name of the chart.
        checks: Text before the object, which Helm renders only if it renders the object.

    Raises:
        KeyError: The manifest lacks a field of FIELD_EXPRESSIONS.
    """
    expressions = {**OWNER, **FIELD_EXPRESSIONS[manifest["kind"]]}
    texts: dict[str, str] = {}

    def token(text: str) -> str:
        name = f"TSX{len(texts)}X"
        texts[name] = text
        return name

    def field(path: str, key: str | None, value: Any) -> list[tuple[str | None, Any]]:
        """Return the keys and values that replace one field; items of lists have no key."""
        expression = expressions.pop(path, "")
        if "\n" in expression:
            return [(token(expression.strip("\n")), None)]
        condition, _, text = (
            expression.removeprefix("if ").partition(" then ")
            if expression.startswith("if ")
            else ("", "", expression)
        )
        entry = (
            key,
            token(text.replace("ITSELF", str(value))) if text else insert_tokens(f"{path} ", value),
        )
        return (
            [(token(f"{{{{- if {condition} }}}}"), None), entry, (token("{{- end }}"), None)]
            if condition
            else [entry]
        )

    def insert_tokens(path_prefix: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return dict(
                pair
                for key, item in value.items()
                for pair in field(f"{path_prefix}{key}", key, item)
            )
        if isinstance(value, (list, tuple)):
            pairs = [
                pair
                for index, item in enumerate(value)
                for pair in field(f"{path_prefix}{index}", None, item)
            ]
            return [item if key is None else key for key, item in pairs]
        return value

    condition = expressions.pop("", "")
    text = yaml_text([insert_tokens("", manifest)])
    if expressions:
        raise KeyError(f"the {manifest['kind']} has no {', '.join(expressions)}")

    def expand_token(match: re.Match[str]) -> str:
        if match[4]:
            return texts[match[4]]
        first_line, *other_lines = texts[match[3]].splitlines()
        indent, dash = match[1], match[2] or ""  # There is a dash if the lines begin an item.
        return "\n".join(
            [
                f"{indent}{dash}{first_line}",
                *(f"{indent}{' ' * len(dash)}{line}" for line in other_lines),
            ]
        )

    text = TOKEN.sub(expand_token, text)
    for name, expression in RELEASE.items():
        text = text.replace(name, expression)
    if condition:
        text = f"{{{{- {condition} }}}}\n{checks}{text}{{{{- end }}}}\n"
    return text.replace("CHART", chart)
