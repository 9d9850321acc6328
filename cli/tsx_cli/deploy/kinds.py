"""Each kind of resource: how it is found, made, changed and removed by boto3."""

from __future__ import annotations

from collections.abc import Mapping

from tsx_cli.deploy.aws.kinds import autoscaling, cloudwatch, ecr, iam, s3
from tsx_cli.deploy.aws_lambda import kinds as lambda_kinds
from tsx_cli.deploy.aws_lambda import lambda_parts
from tsx_cli.deploy.engine.kind import Kind
from tsx_cli.deploy.sagemaker import kinds as sagemaker_kinds

KINDS: Mapping[str, Kind] = {
    "AWS::ApplicationAutoScaling::ScalableTarget": autoscaling.ScalableTarget(),
    "AWS::ApplicationAutoScaling::ScalingPolicy": autoscaling.ScalingPolicy(),
    "AWS::CloudWatch::Alarm": cloudwatch.Alarm(),
    "AWS::ECR::Repository": ecr.Repository(),
    "AWS::IAM::Role": iam.Role(),
    "AWS::Lambda::Alias": lambda_kinds.Alias(),
    "AWS::Lambda::CapacityProvider": lambda_parts.CapacityProvider(),
    "AWS::Lambda::EventSourceMapping": lambda_parts.EventSourceMapping(),
    "AWS::Lambda::Function": lambda_kinds.Function(),
    "AWS::Lambda::Permission": lambda_parts.Permission(),
    "AWS::Lambda::Url": lambda_parts.Url(),
    "AWS::Lambda::Version": lambda_kinds.Version(),
    "AWS::S3::Bucket": s3.Bucket(),
    "AWS::SageMaker::Endpoint": sagemaker_kinds.Endpoint(),
    "AWS::SageMaker::EndpointConfig": sagemaker_kinds.EndpointConfig(),
    "AWS::SageMaker::Model": sagemaker_kinds.Model(),
    "Tsx::ECR::Image": ecr.Image(),
    "Tsx::Lambda::ProvisionedConcurrency": lambda_parts.ProvisionedConcurrency(),
    "Tsx::S3::Object": s3.Object(),
}

__all__ = ["KINDS", "Kind"]
