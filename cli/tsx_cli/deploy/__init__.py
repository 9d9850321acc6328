"""`tsx deploy`: deploys an archive to a container host, Kubernetes, Ray, SageMaker or Lambda."""

POSITION = 60
SUMMARY = (
    "Deploy an archive to a container, Kubernetes, Ray, SageMaker or Lambda, after showing the"
    " plan."
)
