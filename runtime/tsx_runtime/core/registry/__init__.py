"""The registered models: register, replace, look up, unregister."""
