"""The protobuf modules of gRPC, a public import path; the feature `grpc` has the services."""
