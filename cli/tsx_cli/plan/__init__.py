"""`tsx plan`: the size and the cost of a deployment, from measurements."""

POSITION = 100
SUMMARY = "Estimate how many replicas of a measured model a request rate needs, and what they cost."
