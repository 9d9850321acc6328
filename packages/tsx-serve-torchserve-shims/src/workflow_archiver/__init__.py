"""The import surface of TorchServe's `workflow_archiver`, for scripts that pack workflows from Python."""
