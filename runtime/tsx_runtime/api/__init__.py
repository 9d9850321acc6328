"""Code that HTTP and gRPC share: authorization, limits, descriptions and schemas."""
