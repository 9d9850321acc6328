"""The management of models, as HTTP and gRPC offer it: operations, descriptions, schemas,
samples.
"""
