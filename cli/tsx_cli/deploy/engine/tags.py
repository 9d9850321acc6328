"""By what a deployment is found again: there is no other state."""

from __future__ import annotations

from tsx_cli.deploy.engine.facts import Facts
from tsx_cli.deploy.engine.resources import digest
from tsx_cli.deploy.spec import DeploySpec


def tags_of(spec: DeploySpec, facts: Facts) -> dict[str, str]:
    wanted = spec.model_dump(mode="json", exclude={"model", "profile", "tags"})
    return {
        **spec.tags,
        "tsx:name": spec.name,
        "tsx:target": spec.target,
        "tsx:spec-sha": digest(wanted, 16),
        "tsx:model-sha": facts.sha256[:16],
        "tsx:model": f"{facts.model_name}/{facts.model_version}",
        "tsx:image-digest": facts.image_digest,
    }
