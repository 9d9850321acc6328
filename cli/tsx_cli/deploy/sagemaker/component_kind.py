"""SageMaker's inference components, as a kind of resource."""

from __future__ import annotations

from collections.abc import Sequence

from tsx_cli.deploy.aws.session import Cloud
from tsx_cli.deploy.engine.kind import ResourceKind, only, tag_list
from tsx_cli.deploy.engine.plan import Field
from tsx_cli.deploy.engine.resources import Observed, Resource, State, Traits
from tsx_cli.deploy.sagemaker.kinds import BROKEN, CHANGING, put_tags, tags_of_arn

LONGEST_UPDATE = 28_800  # seconds that SageMaker allows for a rolling update
COMPONENT = "AWS::SageMaker::InferenceComponent"


class InferenceComponent(ResourceKind):
    """Another specification replaces its copies as `DeploymentConfig` says; SageMaker restores the former one when an alarm goes off.

    `how` has the number of copies to begin with where scaling decides it afterwards.
    """

    traits = Traits(fixed=frozenset({"EndpointName", "VariantName"}), unseen=frozenset({"DeploymentConfig"}))
    poll, patience = 10.0, LONGEST_UPDATE + 3600.0

    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        doing = f"looking for the component {name}"
        found = cloud.find("sagemaker", "describe_inference_component", doing, InferenceComponentName=name)
        if found is None:
            return None
        status, copies = found["InferenceComponentStatus"], found.get("RuntimeConfig", {})
        state: State = "changing" if status in CHANGING else "failed" if status in BROKEN else "ready"
        reason = found.get("FailureReason") or (status if state != "ready" else "")
        properties = only(found, ("EndpointName", "VariantName", "Specification"))
        properties["RuntimeConfig"] = {"CopyCount": copies.get("DesiredCopyCount", 0)}
        arn = found["InferenceComponentArn"]
        outputs = {"Ref": arn, "status": status, "copies": copies.get("CurrentCopyCount", 0)}
        return Observed(name, properties, tags_of_arn(cloud, arn), outputs, state, reason)

    def create(self, cloud: Cloud, resource: Resource) -> None:
        wanted = only({**resource.properties, **resource.how}, ("EndpointName", "VariantName", "Specification", "RuntimeConfig"))
        named = {"InferenceComponentName": resource.name, "Tags": tag_list(resource.tags)}
        cloud.call("sagemaker", "create_inference_component", f"creating the component {resource.name}", **named, **wanted)

    def update(self, cloud: Cloud, resource: Resource, found: Observed, fields: Sequence[Field]) -> str | None:
        """One change at a time: the specification, and then the number of copies."""
        changed, name = {field.path.split(".")[0] for field in fields}, {"InferenceComponentName": resource.name}
        put_tags(cloud, found.outputs["Ref"], resource)
        if "Specification" in changed:
            wanted = only(resource.properties, ("Specification", "DeploymentConfig"))
            cloud.call("sagemaker", "update_inference_component", f"updating the component {resource.name}", **name, **wanted)
            return "has its specification" if "RuntimeConfig" in changed else None
        if "RuntimeConfig" in changed:
            doing, wanted = f"setting the copies of {resource.name}", resource.properties["RuntimeConfig"]
            cloud.call("sagemaker", "update_inference_component_runtime_config", doing, **name, DesiredRuntimeConfig=wanted)
        return None

    def delete(self, cloud: Cloud, found: Observed) -> str | None:
        """SageMaker refuses it while the component starts, or gets more copies or fewer."""
        now = self.observe(cloud, found.name)
        if now is None or now.outputs["status"] == "Deleting":
            return None
        if now.state == "changing":
            return f"is {now.outputs['status']}, and can be deleted after that"
        cloud.call("sagemaker", "delete_inference_component", f"deleting the component {found.name}", InferenceComponentName=found.name)
        return None
