"""`tsx slowest`: the slowest requests of a server."""

POSITION = 140
SUMMARY = "Show the slowest requests of a running server, and where their time went."
