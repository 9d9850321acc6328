"""`tsx deploy`: deploys an archive to a container host, SageMaker, Lambda or Kubernetes; the plan is shown first."""
