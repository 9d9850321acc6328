"""Front-end processes (`frontends`): they accept https connections, do their TLS, and pass the bytes on to the server's first process."""
