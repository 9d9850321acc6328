"""The command `tsx check --target`.

It simulates a platform's requests and limits for an image's entry point on this machine.
"""
