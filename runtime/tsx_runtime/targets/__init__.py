"""The platforms of the runtime: a server process, container images, SageMaker, Lambda, Ray."""
