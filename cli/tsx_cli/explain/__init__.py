"""`tsx explain`: the times of one request."""

POSITION = 130
SUMMARY = "Show where the time of one request went."
