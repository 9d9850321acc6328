"""Rules that HTTP's lanes and gRPC obey: URLs, headers, bodies, errors, authorization, limits,
descriptions.
"""
