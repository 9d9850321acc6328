"""`tsx deploy`: deploys an archive to a container host, Kubernetes, Ray, SageMaker or Lambda."""
