"""The platforms that the runtime is started on: a server process, images, SageMaker, Lambda."""
