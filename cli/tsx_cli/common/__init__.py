"""Code that all commands share: options, output, failures, the HTTP client."""
