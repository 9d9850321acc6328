"""The command `tsx jobs`: the asynchronous requests of a running server."""
