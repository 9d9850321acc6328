"""The target `kubernetes`: a namespace of a cluster, reached with kubectl."""

from __future__ import annotations

import shutil
from dataclasses import replace

from tsx_cli.common.failure import CliError
from tsx_cli.deploy.container.kinds import PushedImage
from tsx_cli.deploy.engine.facts import Facts
from tsx_cli.deploy.engine.resources import Ref, Resource
from tsx_cli.deploy.image.programs import Builder, Program, pin_digest
from tsx_cli.deploy.image.recipe import Recipe
from tsx_cli.deploy.kubernetes.deployment import KubernetesPlatform
from tsx_cli.deploy.kubernetes.kinds import KIND, KINDS, Cluster, Revision
from tsx_cli.deploy.kubernetes.release import Release, WeightedRoute
from tsx_cli.deploy.kubernetes.resources import manifests
from tsx_cli.deploy.preflight.outlook import DeploymentScaling
from tsx_cli.deploy.spec import DeploySpec
from tsx_cli.deploy.target import BuiltImage, DeployTarget, Location

IMAGE = "Tsx::Registry::Image"


class KubernetesTarget(DeployTarget):
    name = "kubernetes"

    def locate(self, spec: DeploySpec) -> Location:
        if shutil.which("kubectl") is None:
            raise CliError(
                "kubectl is not installed; install it, or write the manifests with --emit"
                " kubernetes and apply them elsewhere"
            )
        settings = spec.kubernetes
        kinds = {
            **KINDS,
            f"{KIND}Deployment": Release(),
            f"{KIND}HTTPRoute": WeightedRoute(),
            f"{KIND}Revision": Revision(),
        }
        arguments = ("--context", settings.context) if settings.context else ()
        cluster = Cluster(Program("kubectl", arguments), settings.namespace)
        return Location(spec.name, self, cluster, KubernetesPlatform(), kinds)

    def scaling(self, spec: DeploySpec) -> DeploymentScaling:
        pod = spec.kubernetes
        return DeploymentScaling(
            pod.replicas, pod.most_replicas if pod.most_replicas > pod.replicas else None
        )

    def check_files(self, spec: DeploySpec) -> None:
        manifests(spec, "", {})  # This raises errors of the specification.

    def pin_image(self, cloud: Cluster, facts: Facts) -> tuple[Facts, None]:
        image = str(facts.image)
        return replace(facts, image=pin_digest(image) if image else image), None

    def built_image(self, cloud: Cluster, spec: DeploySpec, recipe: Recipe) -> BuiltImage:
        image = Resource("Image", IMAGE, f"{spec.repository}:{recipe.tag}", {})
        kinds = {IMAGE: PushedImage(Builder(spec.build.tool), recipe)}
        return BuiltImage(Ref("Image", "Uri", recipe.tag), [image], kinds)


TARGET = KubernetesTarget()
