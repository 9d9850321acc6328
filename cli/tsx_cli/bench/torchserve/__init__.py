"""TorchServe's auto-benchmark: its configuration files, run against tsx or a TorchServe that runs, and its reports."""
