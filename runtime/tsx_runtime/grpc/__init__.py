"""gRPC, as the extra `grpc`: the services of TorchServe and of the Open Inference Protocol, in front of the same queues as HTTP."""
