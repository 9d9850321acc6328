"""Container images: their description, build and push."""
