"""`tsx serve`, and the `torchserve` command."""

POSITION = 20
SUMMARY = "Serve archives, model directories or bare model files on this machine."
