"""The command `tsx check --target`.

On this machine, it sends a platform's requests to an image's entry point, within the platform's
limits.
"""
