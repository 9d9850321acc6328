"""Files instead of calls: CloudFormation, manifests, charts, overlays, compose files, workflows."""
