"""`tsx predict`: one request to a running server."""

POSITION = 80
SUMMARY = "Send a file, or a sample, to a model of a running server and print the answer."
