"""Request bodies in, response bodies out."""
