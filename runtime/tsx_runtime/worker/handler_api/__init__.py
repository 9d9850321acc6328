"""The API for handlers: context, metrics, exceptions, TorchServe's module names."""
