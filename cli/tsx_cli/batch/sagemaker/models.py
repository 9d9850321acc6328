"""The model of a batch transform job.

A model of a deployment with the same archive is used. If there is none, it is created as `tsx
deploy` would create it.
"""

from __future__ import annotations

from dataclasses import replace

from tsx_cli.common.failure import UsageError
from tsx_cli.deploy.aws.kinds.ecr import resolve_digest
from tsx_cli.deploy.engine.facts import Facts
from tsx_cli.deploy.sagemaker.resources import resources
from tsx_cli.deploy.sagemaker.shared_endpoints import MODEL, models_of
from tsx_cli.deploy.spec import DeploySpec
from tsx_cli.deploy.target import Location

NEEDED_KINDS = frozenset({"AWS::S3::Bucket", "Tsx::S3::Object", "AWS::IAM::Role", MODEL})


def transform_model(location: Location, spec: DeploySpec, facts: Facts) -> str:
    """Find or create the model, and return its name.

    Raises:
        UsageError: There is no such model, and no image is configured to create one.
        CliError: AWS refuses a request.
    """
    models = models_of(location.cloud, spec.name)
    names = [name for name in models if models[name].tags.get("tsx:model-sha") == facts.sha256[:16]]
    names = [
        name
        for name in names
        if models[name].properties["PrimaryContainer"].get("Mode") != "MultiModel"
    ]
    if names:
        return max(names, key=lambda name: (models[name].outputs["made"], name))
    if (image := spec.image) is None:
        raise UsageError(
            f"no model of a deployment '{spec.name}' in {location.cloud.region} has this archive:"
            " deploy it with tsx deploy, or set image and "
            r"sagemaker.role under [deploy] in tsx.toml"
        )
    overrides = dict.fromkeys(
        ("component", "multi_model", "serverless", "asynchronous", "autoscaling", "data_capture")
    )
    spec = spec.model_copy(
        update={"sagemaker": spec.sagemaker.model_copy(update=overrides), "canary": None}
    )
    facts = replace(
        facts, account=location.cloud.account, image=resolve_digest(image, location.cloud)[0]
    )
    needed_resources = [
        resource for resource in resources(spec, facts) if resource.kind in NEEDED_KINDS
    ]
    engine = location.engine()
    engine.apply(engine.plan(needed_resources))
    return next(resource.name for resource in needed_resources if resource.kind == MODEL)
