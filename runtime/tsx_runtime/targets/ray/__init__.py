"""A model behind Ray Serve: replicas on the nodes of a Ray cluster."""
