"""Container images: how they are described, built and pushed."""
