"""Commands that manage the models of a running server."""

POSITION = 110
SUMMARY = "List, describe, register, scale and remove the models of a running server."
