"""Metadata of an archive: the manifest, the model configuration, model files."""
