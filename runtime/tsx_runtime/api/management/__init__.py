"""The management of models for HTTP and gRPC: operations, descriptions, schemas, samples."""
