"""TorchServe's files: snapshots of the `torchserve` command, and its metric logs.

`metrics_mode` turns the logs on (docs/reference/torchserve.md). Without this folder there is no
`torchserve` command.
"""
