"""`tsx client`: Python code for tsx-client, generated from the models of a server."""

POSITION = 150
SUMMARY = (
    "Write Python that names the models of a running server, for programs that use tsx-client."
)
