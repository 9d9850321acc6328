"""The web page of the server, and the page of its API at /docs."""
