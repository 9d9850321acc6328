"""What a model's workers may not do: sandbox configuration, cgroups, hidden credentials."""
