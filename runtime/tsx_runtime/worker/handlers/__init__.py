"""The handlers that come with tsx."""
