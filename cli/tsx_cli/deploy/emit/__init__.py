"""`--emit`: CloudFormation templates, manifests, charts, overlays, compose files and workflows."""
