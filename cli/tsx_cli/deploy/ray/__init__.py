"""Ray Serve on a cluster."""
