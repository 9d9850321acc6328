"""Every setting of the server, and where its value came from."""
