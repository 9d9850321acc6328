"""Code that several commands share: options, output, failures, the HTTP client."""
