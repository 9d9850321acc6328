"""The target `lambda`: a Lambda function."""

from __future__ import annotations

from tsx_cli.deploy.aws.session import Cloud
from tsx_cli.deploy.aws.target import AwsTarget
from tsx_cli.deploy.aws_lambda import resources as function
from tsx_cli.deploy.aws_lambda.deployment import LambdaPlatform
from tsx_cli.deploy.aws_lambda.lambda_parts import KINDS
from tsx_cli.deploy.preflight.limits import LIMITS, MIB, TargetProfile, set_limit
from tsx_cli.deploy.spec import DeploySpec


class LambdaTarget(AwsTarget):
    name, kinds = "lambda", KINDS
    main_kinds = frozenset({"AWS::Lambda::Function"})
    resources = staticmethod(function.resources)

    def platform(self, cloud: Cloud, spec: DeploySpec) -> tuple[LambdaPlatform, str]:
        return LambdaPlatform(), function.LOG.format(spec.name)

    def profile(self, spec: DeploySpec) -> TargetProfile:
        """Return the profile of a function; the model is in its image, not in /tmp."""
        settings = spec.lambda_
        limits = {
            **LIMITS["lambda"],
            **set_limit("time", settings.timeout, "lambda.timeout"),
            **set_limit("start", settings.timeout, "lambda.timeout"),
            **set_limit("memory", settings.memory * MIB, "lambda.memory"),
        }
        return TargetProfile("lambda", limits, spec.env, spec.device)


TARGET = LambdaTarget()
