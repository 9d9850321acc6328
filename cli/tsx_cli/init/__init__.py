"""`tsx init`: the files of a new model."""

POSITION = 180
SUMMARY = "Create the files of a new model: a handler, its configuration, a README."
