"""The command `tsx jobs`: the asynchronous requests of a running server."""

POSITION = 120
SUMMARY = "List, show, cancel and retry the asynchronous requests of a running server."
