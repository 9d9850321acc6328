"""Each kind of resource: how it is found, made, changed and removed by boto3."""

from __future__ import annotations

from collections.abc import Mapping

from tsx_cli.deploy.kinds import autoscaling, cloudwatch, ecr, s3, sagemaker
from tsx_cli.deploy.kinds.base import Kind

KINDS: Mapping[str, Kind] = {
    "AWS::ApplicationAutoScaling::ScalableTarget": autoscaling.ScalableTarget(),
    "AWS::ApplicationAutoScaling::ScalingPolicy": autoscaling.ScalingPolicy(),
    "AWS::CloudWatch::Alarm": cloudwatch.Alarm(),
    "AWS::ECR::Repository": ecr.Repository(),
    "AWS::S3::Bucket": s3.Bucket(),
    "AWS::SageMaker::Endpoint": sagemaker.Endpoint(),
    "AWS::SageMaker::EndpointConfig": sagemaker.EndpointConfig(),
    "AWS::SageMaker::Model": sagemaker.Model(),
    "Tsx::ECR::Image": ecr.Image(),
    "Tsx::S3::Object": s3.Object(),
}

__all__ = ["KINDS", "Kind"]
