"""The entry point of container images."""
