"""Execution roles, created only on request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tsx_cli.deploy.aws.iam_policies import SERVICES, role_name
from tsx_cli.deploy.aws.session import Cloud, translated_errors
from tsx_cli.deploy.engine.kind import CloudError, ResourceKind, tag_list, tag_map
from tsx_cli.deploy.engine.resources import Observed, Resource

REFUSALS = {"sagemaker": "could not assume role", "lambda": "cannot be assumed by lambda"}


class Role(ResourceKind):
    """An execution role with one inline policy."""

    poll, patience = 2.0, 120.0

    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        answer = cloud.find("iam", "get_role", f"looking for the role {name}", RoleName=name)
        if answer is None:
            return None
        found, doing, policies = (
            answer["Role"],
            f"looking for the permissions of the role {name}",
            [],
        )
        for each in cloud.call("iam", "list_role_policies", doing, RoleName=name)["PolicyNames"]:
            policy = cloud.call("iam", "get_role_policy", doing, RoleName=name, PolicyName=each)
            policies.append({"PolicyName": each, "PolicyDocument": policy["PolicyDocument"]})
        properties = {
            "AssumeRolePolicyDocument": found["AssumeRolePolicyDocument"],
            "Policies": policies,
        }
        return Observed(
            name, properties, tag_map(found.get("Tags", [])), {"Arn": found["Arn"], "Ref": name}
        )

    def create(self, cloud: Cloud, resource: Resource) -> None:
        """Without its policy, which the call after this one gives it."""
        wanted = {
            "AssumeRolePolicyDocument": json.dumps(resource.properties["AssumeRolePolicyDocument"]),
            "Tags": tag_list(resource.tags),
        }
        wanted["Description"] = f"{resource.tags.get('tsx:name', '')} of tsx deploy runs with it"
        cloud.call(
            "iam",
            "create_role",
            f"creating the role {resource.name}",
            RoleName=resource.name,
            **wanted,
        )

    def update(self, cloud: Cloud, resource: Resource, found: Observed, changed: set[str]) -> None:
        client = cloud.client("iam")
        with translated_errors(f"giving the role {resource.name} its permissions"):
            if "AssumeRolePolicyDocument" in changed:
                trust = json.dumps(resource.properties["AssumeRolePolicyDocument"])
                client.update_assume_role_policy(RoleName=resource.name, PolicyDocument=trust)
            for policy in resource.properties["Policies"]:
                document = json.dumps(policy["PolicyDocument"])
                client.put_role_policy(
                    RoleName=resource.name, PolicyName=policy["PolicyName"], PolicyDocument=document
                )
            if "tags" in changed:
                client.tag_role(RoleName=resource.name, Tags=tag_list(resource.tags))

    def delete(self, cloud: Cloud, found: Observed) -> None:
        client = cloud.client("iam")
        with translated_errors(f"deleting the role {found.name}"):
            for policy in found.properties["Policies"]:
                client.delete_role_policy(RoleName=found.name, PolicyName=policy["PolicyName"])
            client.delete_role(RoleName=found.name)


def own_role(cloud: Cloud, name: str, target: str) -> list[Resource]:
    """The role that was made for a deployment, where one was: not by an identity that may not even
    look for it.
    """
    role = Resource("Role", "AWS::IAM::Role", role_name(name, target), {})
    try:
        found = Role().observe(cloud, role.name)
    except CloudError as error:
        if "AccessDenied" not in error.code:
            raise
        return []
    return [role] if found is not None and found.tags.get("tsx:name") == name else []


def call_with_role(
    cloud: Cloud, target: str, operation: str, doing: str, arn: str, **arguments: Any
) -> str | None:
    """Call a service that has to assume a role.

    A text says that it cannot do so yet, with the likely reason. Raises CloudError where that will
    not pass.
    """
    try:
        cloud.call(target, operation, doing, **arguments)
    except CloudError as error:
        if REFUSALS[target] not in error.message.lower():
            raise
        reason, may_pass = _why_not_assumed(cloud, arn, target)
        text = f"{error.message.rstrip('.')}. {reason}"
        if may_pass:
            return text
        raise CloudError(text, error.code) from error
    return None


def _why_not_assumed(cloud: Cloud, arn: str, target: str) -> tuple[str, bool]:
    """Whether it may pass: a new role, or a new trust policy, reaches all of AWS with a delay."""
    service, name = SERVICES[target], arn.rpartition("/")[2]
    owner = arn.split(":")[4]
    if owner != cloud.account:
        return (
            (
                f"The role belongs to the account {owner}, and a role must be of the account that"
                f" deploys, {cloud.account}"
            ),
            False,
        )
    try:
        found = cloud.find("iam", "get_role", f"looking for the role {name}", RoleName=name)
    except CloudError as error:
        return (
            f"Its trust policy must name {service}, which could not be checked ({error.message})",
            True,
        )
    if found is None:
        return (
            f"There is no role {name}: correct --role, or have one created with --create-role",
            False,
        )
    shown = f"`aws iam get-role --role-name {name} --query Role.AssumeRolePolicyDocument` shows it"
    statements = _trusting(found["Role"]["AssumeRolePolicyDocument"], service)
    if not statements:
        sets = (
            f"`aws iam update-assume-role-policy --role-name {name} --policy-document"
            f" file://infra/iam/trust-{target}.json`"
        )
        return (
            (
                f"The trust policy of the role does not allow {service} to assume it: {shown}, and"
                f" {sets} sets the one that is needed"
            ),
            False,
        )
    conditions = (
        ", but its conditions may exclude it"
        if all("Condition" in each for each in statements)
        else ""
    )
    return (
        (
            f"The trust policy of the role names {service}{conditions}: {shown}. A new role can be"
            " assumed within a minute"
        ),
        True,
    )


def _trusting(policy: Mapping[str, Any], service: str) -> list[Mapping[str, Any]]:
    """The statements that allow a service to assume a role."""

    def listed(value: Any) -> list[Any]:
        return value if isinstance(value, list) else [value]

    def names(statement: Mapping[str, Any]) -> bool:
        who = statement.get("Principal", {})
        services = ["*"] if who == "*" else listed(who.get("Service", []))
        actions = listed(statement.get("Action", []))
        return (
            statement["Effect"] == "Allow"
            and bool({"*", service} & set(services))
            and bool({"*", "sts:*", "sts:AssumeRole"} & set(actions))
        )

    return [each for each in listed(policy["Statement"]) if names(each)]
