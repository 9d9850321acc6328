"""Relays (`frontends`): processes that accept https connections, do their TLS, and pass their bytes on to the server."""
