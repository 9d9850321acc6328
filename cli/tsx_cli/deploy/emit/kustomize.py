"""A base for kustomize and two overlays: the objects, and for each environment what it may say
otherwise. Pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tsx_cli.common.failure import UsageError
from tsx_cli.deploy.emit.helm import image_parts
from tsx_cli.deploy.emit.yaml_text import yaml_text
from tsx_cli.deploy.kubernetes.resources import Manifest, manifests, scales
from tsx_cli.deploy.spec import DeploySpec

OWN: Mapping[str, tuple[str, ...]] = {  # the fields of a spec that an overlay has a patch for
    "Deployment": ("replicas", "template"),
    "HorizontalPodAutoscaler": ("minReplicas", "maxReplicas"),
    "ScaledObject": (
        "minReplicaCount",
        "maxReplicaCount",
        "triggers",
    ),  # whose queries name the namespace
    "HTTPRoute": ("parentRefs", "hostnames"),
}
HEAD = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization"}


def kustomize(
    spec: DeploySpec, image: str, labels: Mapping[str, str], names: Mapping[str, str]
) -> dict[str, str]:
    """The files by their paths. `names` are those of the manifests' files. Raises UsageError."""
    if spec.kubernetes.kserve:
        raise UsageError(
            "--emit kustomize is for a Deployment; for an InferenceService (kubernetes.kserve) use"
            " --emit kubernetes"
        )
    made = manifests(spec, image, labels)
    base = {names[each["kind"]]: each for each in made}
    for each in made:
        del each["metadata"]["namespace"]  # that of the overlay
    found = {f"base/{name}": yaml_text([each]) for name, each in base.items()}
    found["base/kustomization.yaml"] = yaml_text([{**HEAD, "resources": list(base)}])
    for environment, one in (("staging", _staging(spec)), ("production", spec)):
        patches = {
            names[each["kind"]]: _patch(each)
            for each in manifests(one, image, labels)
            if each["kind"] in OWN
        }
        whole = {
            **HEAD,
            "namespace": one.kubernetes.namespace,
            "resources": ["../../base"],
            "images": [_image(image)],
            "patches": [{"path": name} for name in patches],
        }
        found[f"overlays/{environment}/kustomization.yaml"] = yaml_text([whole])
        found |= {
            f"overlays/{environment}/{name}": yaml_text([patch]) for name, patch in patches.items()
        }
    return found


def _staging(spec: DeploySpec) -> DeploySpec:
    """As small as it can be with the same objects, in a namespace and under hosts of its own."""
    own = spec.kubernetes
    few = min(own.replicas, 1)
    hosts = tuple(
        f"*.staging.{host[2:]}" if host.startswith("*.") else f"staging.{host}"
        for host in own.hostnames
    )
    sizes = {"replicas": few, "most_replicas": 2 if scales(spec) else max(few, 1)}
    changes = {"namespace": f"{own.namespace[:55]}-staging", "hostnames": hosts, **sizes}
    return spec.model_copy(update={"kubernetes": own.model_copy(update=changes)})


def _patch(manifest: Manifest) -> Manifest:
    body = {key: manifest["spec"][key] for key in OWN[manifest["kind"]] if key in manifest["spec"]}
    if "template" in body:
        (container,) = body["template"]["spec"]["containers"]
        body["template"] = {
            "spec": {"containers": [{key: container[key] for key in ("name", "resources")}]}
        }
    return {
        "apiVersion": manifest["apiVersion"],
        "kind": manifest["kind"],
        "metadata": {"name": manifest["metadata"]["name"]},
        "spec": body,
    }


def _image(image: str) -> dict[str, Any]:
    parts = image_parts(image)
    chosen = (
        {"digest": parts["digest"]} if parts["digest"] else {"newTag": parts["tag"] or "latest"}
    )
    return {"name": parts["repository"], **chosen}
