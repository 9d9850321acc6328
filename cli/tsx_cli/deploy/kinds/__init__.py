"""Each kind of resource: how it is found, made, changed and removed by boto3."""

from __future__ import annotations

from collections.abc import Mapping

from tsx_cli.deploy.aws.kinds import autoscaling, cloudwatch, ecr, iam, s3
from tsx_cli.deploy.engine.kind import Kind
from tsx_cli.deploy.kinds import lambda_, lambda_parts, sagemaker

KINDS: Mapping[str, Kind] = {
    "AWS::ApplicationAutoScaling::ScalableTarget": autoscaling.ScalableTarget(),
    "AWS::ApplicationAutoScaling::ScalingPolicy": autoscaling.ScalingPolicy(),
    "AWS::CloudWatch::Alarm": cloudwatch.Alarm(),
    "AWS::ECR::Repository": ecr.Repository(),
    "AWS::IAM::Role": iam.Role(),
    "AWS::Lambda::Alias": lambda_.Alias(),
    "AWS::Lambda::CapacityProvider": lambda_parts.CapacityProvider(),
    "AWS::Lambda::EventSourceMapping": lambda_parts.EventSourceMapping(),
    "AWS::Lambda::Function": lambda_.Function(),
    "AWS::Lambda::Permission": lambda_parts.Permission(),
    "AWS::Lambda::Url": lambda_parts.Url(),
    "AWS::Lambda::Version": lambda_.Version(),
    "AWS::S3::Bucket": s3.Bucket(),
    "AWS::SageMaker::Endpoint": sagemaker.Endpoint(),
    "AWS::SageMaker::EndpointConfig": sagemaker.EndpointConfig(),
    "AWS::SageMaker::Model": sagemaker.Model(),
    "Tsx::ECR::Image": ecr.Image(),
    "Tsx::Lambda::ProvisionedConcurrency": lambda_parts.ProvisionedConcurrency(),
    "Tsx::S3::Object": s3.Object(),
}

__all__ = ["KINDS", "Kind"]
