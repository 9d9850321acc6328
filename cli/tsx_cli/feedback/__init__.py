"""`tsx feedback`: the truth of earlier answers, from a file to a running server."""

POSITION = 86
SUMMARY = "Report the right answers of earlier requests to a server that monitors a model."
