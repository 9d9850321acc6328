"""Container images: recipe, build, push."""
