"""`tsx replay`: the requests of a recording, sent again."""

POSITION = 90
SUMMARY = "Replay the requests of a recording to a running server, and report how it answered."
