"""The metric logs of TorchServe, and the snapshots of the command `torchserve`.

The setting `metrics_mode` turns the logs on (docs/reference/torchserve.md). The command needs this
folder.
"""
