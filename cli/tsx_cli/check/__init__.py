"""The command `tsx check --target`.

On this machine, it sends a platform's requests to an image's entry point, within the platform's
limits.
"""

POSITION = 70
SUMMARY = (
    "Check on this machine that a model meets the contract of SageMaker, Lambda or a container."
)
