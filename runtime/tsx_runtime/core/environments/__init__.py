"""Virtual environments of models that bring their own requirements."""
