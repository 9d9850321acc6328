"""The server of container images: its settings and the discovery of its model."""
