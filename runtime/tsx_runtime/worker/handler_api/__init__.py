"""What a handler sees: context, metrics, exceptions, TorchServe's module names."""
