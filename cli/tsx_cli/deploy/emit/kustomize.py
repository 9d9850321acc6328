"""A kustomize base with an overlay for each of two environments; pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tsx_cli.common.failure import UsageError
from tsx_cli.deploy.emit.helm import image_parts
from tsx_cli.deploy.emit.yaml_text import yaml_text
from tsx_cli.deploy.kubernetes.resources import Manifest, is_autoscaled, manifests
from tsx_cli.deploy.spec import DeploySpec

PATCHED_FIELDS: Mapping[str, tuple[str, ...]] = {  # kind -> fields of `spec` that overlays patch
    "Deployment": ("replicas", "template"),
    "HorizontalPodAutoscaler": ("minReplicas", "maxReplicas"),
    # The triggers are patched because their queries contain the namespace.
    "ScaledObject": ("minReplicaCount", "maxReplicaCount", "triggers"),
    "HTTPRoute": ("parentRefs", "hostnames"),
}
KUSTOMIZATION_HEADER = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}


def kustomize(
    spec: DeploySpec, image: str, labels: Mapping[str, str], names: Mapping[str, str]
) -> dict[str, str]:
    """Return the files by their paths.

    Args:
        spec: The specification of production.
        image: The name of the image.
        labels: The labels of all objects.
        names: The file names of the manifests, by kind.

    Raises:
        UsageError: The deployment would fail, or it uses KServe.
    """
    if spec.kubernetes.kserve:
        raise UsageError(
            "--emit kustomize is for a Deployment; for an InferenceService (kubernetes.kserve) use"
            " --emit kubernetes"
        )
    objects = manifests(spec, image, labels)
    base = {names[manifest["kind"]]: manifest for manifest in objects}
    for manifest in objects:
        del manifest["metadata"]["namespace"]  # The overlays set it.
    files = {f"base/{name}": yaml_text([manifest]) for name, manifest in base.items()}
    files["base/kustomization.yaml"] = yaml_text(
        [{**KUSTOMIZATION_HEADER, "resources": list(base)}]
    )
    for environment, environment_spec in (("staging", _staging_spec(spec)), ("production", spec)):
        patches = {
            names[manifest["kind"]]: _patch(manifest)
            for manifest in manifests(environment_spec, image, labels)
            if manifest["kind"] in PATCHED_FIELDS
        }
        kustomization = {
            **KUSTOMIZATION_HEADER,
            "namespace": environment_spec.kubernetes.namespace,
            "resources": ["../../base"],
            "images": [_image(image)],
            "patches": [{"path": name} for name in patches],
        }
        files[f"overlays/{environment}/kustomization.yaml"] = yaml_text([kustomization])
        files |= {
            f"overlays/{environment}/{name}": yaml_text([patch]) for name, patch in patches.items()
        }
    return files


def _staging_spec(spec: DeploySpec) -> DeploySpec:
    """Return a small variant with the same objects, in another namespace and with other hosts."""
    settings = spec.kubernetes
    replicas = min(settings.replicas, 1)
    hosts = tuple(
        f"*.staging.{host[2:]}" if host.startswith("*.") else f"staging.{host}"
        for host in settings.hostnames
    )
    scaling = {
        "replicas": replicas,
        "most_replicas": 2 if is_autoscaled(spec) else max(replicas, 1),
    }
    changes = {"namespace": f"{settings.namespace[:55]}-staging", "hostnames": hosts, **scaling}
    return spec.model_copy(update={"kubernetes": settings.model_copy(update=changes)})


def _patch(manifest: Manifest) -> Manifest:
    spec_patch = {
        key: manifest["spec"][key]
        for key in PATCHED_FIELDS[manifest["kind"]]
        if key in manifest["spec"]
    }
    if "template" in spec_patch:
        (container,) = spec_patch["template"]["spec"]["containers"]
        spec_patch["template"] = {
            "spec": {"containers": [{key: container[key] for key in ("name", "resources")}]}
        }
    return {
        "apiVersion": manifest["apiVersion"],
        "kind": manifest["kind"],
        "metadata": {"name": manifest["metadata"]["name"]},
        "spec": spec_patch,
    }


def _image(image: str) -> dict[str, Any]:
    parts = image_parts(image)
    image_version = (
        {"digest": parts["digest"]} if parts["digest"] else {"newTag": parts["tag"] or "latest"}
    )
    return {"name": parts["repository"], **image_version}
