"""S3 buckets, and the objects that a deployment uploads."""

from __future__ import annotations

from pathlib import Path

from tsx_archiver.storage.private_directory import scratch_directory
from tsx_cli.deploy.aws.session import Cloud, translate_errors
from tsx_cli.deploy.engine.facts import write_model_data
from tsx_cli.deploy.engine.kind import CloudError, ResourceKind, tag_list
from tsx_cli.deploy.engine.resources import Observed, Resource, Traits

SHA_KEY = "tsx-sha256"  # key of the object metadata with the SHA-256 of the content


class Bucket(ResourceKind):
    traits = Traits(is_tagged=False)

    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        """Return the bucket with its block of public access, which completes its creation."""
        if cloud.find("s3", "head_bucket", f"looking for the bucket {name}", Bucket=name) is None:
            return None
        public_access_block: dict[str, bool] = {}
        try:
            doing = f"checking that the bucket {name} blocks public access"
            public_access_block = cloud.call("s3", "get_public_access_block", doing, Bucket=name)[
                "PublicAccessBlockConfiguration"
            ]
        except CloudError as error:
            if error.code != "NoSuchPublicAccessBlockConfiguration":
                raise
        return Observed(
            name,
            {"PublicAccessBlockConfiguration": public_access_block},
            outputs={"BucketName": name},
        )

    def create(self, cloud: Cloud, resource: Resource) -> None:
        location = (
            {}
            if cloud.region == "us-east-1"
            else {"CreateBucketConfiguration": {"LocationConstraint": cloud.region}}
        )
        cloud.call(
            "s3",
            "create_bucket",
            f"creating the bucket {resource.name}",
            Bucket=resource.name,
            **location,
        )

    def update(
        self, cloud: Cloud, resource: Resource, observed: Observed, changed: set[str]
    ) -> None:
        """Set tags and block public access; this also completes the creation."""
        client, public_access_block = (
            cloud.client("s3"),
            resource.properties["PublicAccessBlockConfiguration"],
        )
        with translate_errors(f"blocking public access to the bucket {resource.name}"):
            client.put_bucket_tagging(
                Bucket=resource.name, Tagging={"TagSet": tag_list(resource.tags)}
            )
            client.put_public_access_block(
                Bucket=resource.name, PublicAccessBlockConfiguration=public_access_block
            )

    def delete(self, cloud: Cloud, observed: Observed) -> None:
        cloud.call(
            "s3",
            "delete_bucket",
            f"deleting the bucket {observed.name}; it must be empty",
            Bucket=observed.name,
        )


class S3Object(ResourceKind):
    """An archive in a bucket, packed into a `model.tar.gz` for SageMaker.

    Its name is `bucket/key`.
    """

    traits = Traits(is_tagged=False, unreported=frozenset({"Path"}))

    def observe(self, cloud: Cloud, name: str) -> Observed | None:
        bucket, _, key = name.partition("/")
        head = cloud.find("s3", "head_object", f"looking for s3://{name}", Bucket=bucket, Key=key)
        if head is None:
            return None
        return Observed(
            name, {"Sha256": head["Metadata"].get(SHA_KEY)}, outputs={"Url": f"s3://{name}"}
        )

    def create(self, cloud: Cloud, resource: Resource) -> None:
        bucket, _, key = resource.name.partition("/")
        extra_args = {"Metadata": {SHA_KEY: resource.properties["Sha256"]}}
        archive = Path(resource.properties["Path"])
        with (
            scratch_directory("tsx-deploy-") as directory,
            translate_errors(f"uploading {archive.name} to s3://{resource.name}"),
        ):
            cloud.client("s3").upload_file(
                str(write_model_data(archive, directory)), bucket, key, ExtraArgs=extra_args
            )

    def delete(self, cloud: Cloud, observed: Observed) -> None:
        bucket, _, key = observed.name.partition("/")
        cloud.call("s3", "delete_object", f"deleting s3://{observed.name}", Bucket=bucket, Key=key)
