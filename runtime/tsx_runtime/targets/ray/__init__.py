"""Models behind Ray Serve: an ingress, and replicas on the nodes of a Ray cluster."""
