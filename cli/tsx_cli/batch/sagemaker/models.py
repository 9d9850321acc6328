"""The model of a batch transform job: that of a deployment with the same archive, or one that is
created as `tsx deploy` would.
"""

from __future__ import annotations

from dataclasses import replace

from tsx_cli.common.failure import UsageError
from tsx_cli.deploy.commands.locations import Location
from tsx_cli.deploy.commands.verbs import by_digest
from tsx_cli.deploy.engine.facts import Facts
from tsx_cli.deploy.sagemaker.resources import resources
from tsx_cli.deploy.sagemaker.shared_endpoints import MODEL, models_of
from tsx_cli.deploy.spec import DeploySpec

NEEDED = frozenset({"AWS::S3::Bucket", "Tsx::S3::Object", "AWS::IAM::Role", MODEL})


def transform_model(place: Location, spec: DeploySpec, facts: Facts) -> str:
    """Its name. Raises UsageError and CliError."""
    found = models_of(place.cloud, spec.name)
    same = [each for each in found if found[each].tags.get("tsx:model-sha") == facts.sha256[:16]]
    same = [
        each
        for each in same
        if found[each].properties["PrimaryContainer"].get("Mode") != "MultiModel"
    ]
    if same:
        return max(same, key=lambda each: (found[each].outputs["made"], each))
    if (image := spec.image) is None:
        raise UsageError(
            f"no model of a deployment '{spec.name}' in {place.cloud.region} has this archive:"
            " deploy it with tsx deploy, or set image and "
            r"sagemaker.role under [deploy] in tsx.toml"
        )
    alone = {
        "component": None,
        "multi_model": None,
        "serverless": None,
        "asynchronous": None,
        "autoscaling": None,
        "data_capture": None,
    }
    spec = spec.model_copy(
        update={"sagemaker": spec.sagemaker.model_copy(update=alone), "canary": None}
    )
    facts = replace(facts, account=place.cloud.account, image=by_digest(image, place.cloud)[0])
    wanted = [each for each in resources(spec, facts) if each.kind in NEEDED]
    engine = place.engine()
    engine.apply(engine.plan(wanted))
    return next(each.name for each in wanted if each.kind == MODEL)
