"""Commands that manage the models of a running server."""
