"""Rules that HTTP and gRPC share: URLs, headers, bodies, errors, authorization, descriptions."""
