"""`tsx config`: the settings and their origins."""

POSITION = 160
SUMMARY = "Show every setting and where its value came from."
