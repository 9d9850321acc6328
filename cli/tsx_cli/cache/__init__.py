"""`tsx cache`: the unpacked archives and the environments of models."""

POSITION = 170
SUMMARY = (
    "List what tsx has unpacked and installed for models on this machine, and remove what nothing"
    " uses."
)
