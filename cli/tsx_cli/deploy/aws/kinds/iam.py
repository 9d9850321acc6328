"""Execution roles, created only on request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tsx_cli.deploy.aws.iam_policies import SERVICES, role_name
from tsx_cli.deploy.aws.session import Cloud, translate_errors
from tsx_cli.deploy.engine.kind import CloudError, ResourceKind, tag_list, tag_map
from tsx_cli.deploy.engine.resources import Observed, Resource, owned

REFUSALS = {"sagemaker": "could not assume role", "lambda": "cannot be assumed by lambda"}


class Role(ResourceKind):
    """An execution role with one inline policy."""

    poll_interval_s, timeout_s = 2.0, 120.0

    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        response = cloud.find("iam", "get_role", f"looking for the role {name}", RoleName=name)
        if response is None:
            return None
        role = response["Role"]
        doing = f"looking for the permissions of the role {name}"
        policies = []
        for policy_name in cloud.call("iam", "list_role_policies", doing, RoleName=name)[
            "PolicyNames"
        ]:
            policy = cloud.call(
                "iam", "get_role_policy", doing, RoleName=name, PolicyName=policy_name
            )
            policies.append({"PolicyName": policy_name, "PolicyDocument": policy["PolicyDocument"]})
        properties = {
            "AssumeRolePolicyDocument": role["AssumeRolePolicyDocument"],
            "Policies": policies,
        }
        return Observed(
            name, properties, tag_map(role.get("Tags", [])), {"Arn": role["Arn"], "Ref": name}
        )

    def create(self, cloud: Cloud, resource: Resource) -> None:
        """Create the role; a following `update` gives it its policy."""
        arguments = {
            "AssumeRolePolicyDocument": json.dumps(resource.properties["AssumeRolePolicyDocument"]),
            "Tags": tag_list(resource.tags),
        }
        arguments["Description"] = f"{resource.tags.get('tsx:name', '')} of tsx deploy runs with it"
        cloud.call(
            "iam",
            "create_role",
            f"creating the role {resource.name}",
            RoleName=resource.name,
            **arguments,
        )

    def update(
        self, cloud: Cloud, resource: Resource, observed: Observed, changed: set[str]
    ) -> None:
        client = cloud.client("iam")
        with translate_errors(f"giving the role {resource.name} its permissions"):
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

    def delete(self, cloud: Cloud, observed: Observed) -> None:
        client = cloud.client("iam")
        with translate_errors(f"deleting the role {observed.name}"):
            for policy in observed.properties["Policies"]:
                client.delete_role_policy(RoleName=observed.name, PolicyName=policy["PolicyName"])
            client.delete_role(RoleName=observed.name)


def own_role(cloud: Cloud, name: str, target: str) -> list[Resource]:
    """Return the role that was created for a deployment, if there is one.

    An identity without the permission to read roles cannot have created one.
    """
    role = Resource("Role", "AWS::IAM::Role", role_name(name, target), {})
    try:
        observed = Role().observe(cloud, role.name)
    except CloudError as error:
        if "AccessDenied" not in error.code:
            raise
        return []
    return [role] if owned(observed, name) else []


def call_with_role(
    cloud: Cloud, target: str, operation: str, doing: str, arn: str, **arguments: Any
) -> str | None:
    """Call a service that has to assume a role.

    Returns:
        None, or the likely reason why the service cannot assume the role yet.

    Raises:
        CloudError: The call failed, and waiting does not help.
    """
    try:
        cloud.call(target, operation, doing, **arguments)
    except CloudError as error:
        if REFUSALS[target] not in error.message.lower():
            raise
        reason, can_recover = _reason_not_assumed(cloud, arn, target)
        text = f"{error.message.rstrip('.')}. {reason}"
        if can_recover:
            return text
        raise CloudError(text, error.code) from error
    return None


def _reason_not_assumed(cloud: Cloud, arn: str, target: str) -> tuple[str, bool]:
    """Return the reason why a role was not assumed, and whether waiting may help.

    New roles and new trust policies reach all of AWS with a delay.
    """
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
        response = cloud.find("iam", "get_role", f"looking for the role {name}", RoleName=name)
    except CloudError as error:
        return (
            f"Its trust policy must name {service}, which could not be checked ({error.message})",
            True,
        )
    if response is None:
        return (
            f"There is no role {name}: correct --role, or have one created with --create-role",
            False,
        )
    show_hint = (
        f"`aws iam get-role --role-name {name} --query Role.AssumeRolePolicyDocument` shows it"
    )
    statements = _trust_statements(response["Role"]["AssumeRolePolicyDocument"], service)
    if not statements:
        fix_hint = (
            f"`aws iam update-assume-role-policy --role-name {name} --policy-document"
            f" file://infra/iam/trust-{target}.json`"
        )
        return (
            (
                f"The trust policy of the role does not allow {service} to assume it: {show_hint},"
                f" and {fix_hint} sets the one that is needed"
            ),
            False,
        )
    conditions = (
        ", but its conditions may exclude it"
        if all("Condition" in statement for statement in statements)
        else ""
    )
    return (
        (
            f"The trust policy of the role names {service}{conditions}: {show_hint}. A new role can"
            " be assumed within a minute"
        ),
        True,
    )


def _trust_statements(policy: Mapping[str, Any], service: str) -> list[Mapping[str, Any]]:
    """Return the statements of a policy that allow a service to assume a role."""

    def as_list(value: Any) -> list[Any]:
        return value if isinstance(value, list) else [value]

    def allows_service(statement: Mapping[str, Any]) -> bool:
        principal = statement.get("Principal", {})
        services = ["*"] if principal == "*" else as_list(principal.get("Service", []))
        actions = as_list(statement.get("Action", []))
        return (
            statement["Effect"] == "Allow"
            and bool({"*", service} & set(services))
            and bool({"*", "sts:*", "sts:AssumeRole"} & set(actions))
        )

    return [statement for statement in as_list(policy["Statement"]) if allows_service(statement)]
