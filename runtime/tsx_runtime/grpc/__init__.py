"""gRPC, the extra `grpc`: the services of TorchServe and of the Open Inference Protocol.

They share the queues of models with HTTP.
"""
