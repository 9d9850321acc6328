"""`tsx deploy`: an archive on a container host, SageMaker, Lambda or Kubernetes, by a plan that is shown before it is carried out."""
