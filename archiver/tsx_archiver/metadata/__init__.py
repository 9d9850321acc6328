"""What an archive says about itself: the manifest, the model configuration, model files."""
