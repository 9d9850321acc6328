"""Each kind of resource: how it is found, made, changed and removed by boto3."""
