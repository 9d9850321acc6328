"""`tsx serve`, and the `torchserve` command."""
