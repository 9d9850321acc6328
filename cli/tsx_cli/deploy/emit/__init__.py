"""Files instead of calls: CloudFormation, manifests, compose files."""
