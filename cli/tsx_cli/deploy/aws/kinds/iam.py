"""Execution roles, created only on request."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tsx_cli.deploy.aws.iam_policies import role_name
from tsx_cli.deploy.aws.session import Cloud, translated_errors
from tsx_cli.deploy.engine.kind import ResourceKind, tag_list, tag_map
from tsx_cli.deploy.engine.plan import Field
from tsx_cli.deploy.engine.resources import Observed, Resource


class Role(ResourceKind):
    """An execution role with one inline policy."""

    poll, patience = 2.0, 120.0

    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        answer = cloud.find("iam", "get_role", f"looking for the role {name}", RoleName=name)
        if answer is None:
            return None
        found, doing, policies = answer["Role"], f"looking for the permissions of the role {name}", []
        for each in cloud.call("iam", "list_role_policies", doing, RoleName=name)["PolicyNames"]:
            policy = cloud.call("iam", "get_role_policy", doing, RoleName=name, PolicyName=each)
            policies.append({"PolicyName": each, "PolicyDocument": policy["PolicyDocument"]})
        properties = {"AssumeRolePolicyDocument": found["AssumeRolePolicyDocument"], "Policies": policies}
        return Observed(name, properties, tag_map(found.get("Tags", [])), {"Arn": found["Arn"], "Ref": name})

    def create(self, cloud: Cloud, resource: Resource) -> None:
        """Without its policy, which the call after this one gives it."""
        wanted = {"AssumeRolePolicyDocument": json.dumps(resource.properties["AssumeRolePolicyDocument"]), "Tags": tag_list(resource.tags)}
        wanted["Description"] = f"{resource.tags.get('tsx:name', '')} of tsx deploy runs with it"
        cloud.call("iam", "create_role", f"creating the role {resource.name}", RoleName=resource.name, **wanted)

    def update(self, cloud: Cloud, resource: Resource, found: Observed, fields: Sequence[Field]) -> None:
        client = cloud.client("iam")
        with translated_errors(f"giving the role {resource.name} its permissions"):
            if any(field.path.startswith("AssumeRolePolicyDocument") for field in fields):
                trust = json.dumps(resource.properties["AssumeRolePolicyDocument"])
                client.update_assume_role_policy(RoleName=resource.name, PolicyDocument=trust)
            for policy in resource.properties["Policies"]:
                document = json.dumps(policy["PolicyDocument"])
                client.put_role_policy(RoleName=resource.name, PolicyName=policy["PolicyName"], PolicyDocument=document)
            if any(field.path.startswith("tags.") for field in fields):
                client.tag_role(RoleName=resource.name, Tags=tag_list(resource.tags))

    def delete(self, cloud: Cloud, found: Observed) -> None:
        client = cloud.client("iam")
        with translated_errors(f"deleting the role {found.name}"):
            for policy in found.properties["Policies"]:
                client.delete_role_policy(RoleName=found.name, PolicyName=policy["PolicyName"])
            client.delete_role(RoleName=found.name)


def own_role(cloud: Cloud, name: str, target: str) -> list[Resource]:
    """The role that was made for a deployment, where one was."""
    role = Resource("Role", "AWS::IAM::Role", role_name(name, target), {})
    found = Role().observe(cloud, role.name)
    return [role] if found is not None and found.tags.get("tsx:name") == name else []
