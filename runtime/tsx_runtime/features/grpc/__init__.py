"""The gRPC services of TorchServe and of the Open Inference Protocol (the extra `grpc`).

Their requests wait in the same queues as HTTP requests. `enable_grpc = false` turns gRPC off; the
settings `grpc_*` set its addresses and limits (docs/guides/grpc.md).
"""
