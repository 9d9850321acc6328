"""The management routes of workflows: register, list, describe, unregister."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field, RootModel

from tsx_runtime.api.management.camel import Camel
from tsx_runtime.api.management.describe import PAGE, page_of
from tsx_runtime.api.management.schemas import Flag, Status, parameters_of
from tsx_runtime.features.workflows.manager import Workflow, WorkflowOrder, Workflows
from tsx_runtime.http.routes import openapi
from tsx_runtime.http.routes.responses import json_answer, read_parameters

WorkflowName = Annotated[str, Path(description="a registered workflow", examples=["dog_breed"])]


class RegisterWorkflow(BaseModel):
    """Parameters of a registration, from the query string or a JSON body, which has precedence."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"url": "dog_breed.war", "workflow_name": "dog_breed"}]}
    )

    url: str | None = Field(
        None, description="name of the archive's file in the workflow store, or its URL; required"
    )
    workflow_name: str | None = Field(None, description="the archive's own if not given")
    response_timeout: int | None = Field(
        None, ge=0, description="seconds a worker of a node may take for a batch"
    )
    startup_timeout: int | None = Field(
        None, ge=0, description="seconds a worker of a node may take to load"
    )
    s3_sse_kms: Flag = Field(False, description="ask S3 for an object that is encrypted with KMS")


class ListedWorkflow(Camel):
    workflow_name: str
    workflow_url: str


class WorkflowList(Camel):
    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"workflows": [{"workflowName": "dogs", "workflowUrl": "dogs.war"}]}]
        }
    )

    next_page_token: str | None = None
    workflows: list[ListedWorkflow]


class DescribedWorkflow(Camel):
    """A workflow; its limits are the defaults for its nodes."""

    workflow_name: str
    workflow_url: str
    min_workers: int
    max_workers: int
    batch_size: int
    max_batch_delay: int = Field(description="milliseconds")
    workflow_dag: str


class DescribedWorkflows(RootModel[list[DescribedWorkflow]]):
    """A list with exactly one workflow, as in TorchServe."""


def describe_workflow(workflow: Workflow) -> DescribedWorkflow:
    spec = workflow.archive.spec
    defaults = spec.settings
    return DescribedWorkflow(
        workflow_name=workflow.name,
        workflow_url=workflow.url,
        min_workers=_value_or(defaults.min_workers, 1),
        max_workers=_value_or(defaults.max_workers, 1),
        batch_size=_value_or(defaults.batch_size, 1),
        max_batch_delay=_value_or(defaults.max_batch_delay, 50),
        workflow_dag="{"
        + ", ".join(
            f"{node}=[{', '.join(following)}]"
            for node, following in spec.edges.items()
            if following
        )
        + "}",
    )


def _value_or(value: int | None, default: int) -> int:
    return default if value is None else value


def build_router(workflows: Workflows, limit: int) -> APIRouter:
    router = APIRouter(tags=["workflows"])

    @router.get(
        "/workflows",
        summary="List the workflows",
        response_model=WorkflowList,
        responses=openapi.failures(400),
    )
    async def list_(
        limit: Annotated[int, Query(description="workflows of one page, at most 100")] = PAGE,
        next_page_token: Annotated[int, Query(description="first entry of the page")] = 0,
    ) -> Response:
        ordered = sorted(workflows.workflows.values(), key=lambda workflow: workflow.name)
        page, following = page_of(ordered, limit, next_page_token)
        listed = [
            ListedWorkflow(workflow_name=workflow.name, workflow_url=workflow.url)
            for workflow in page
        ]
        return json_answer(WorkflowList(next_page_token=following, workflows=listed))

    @router.post(
        "/workflows",
        summary="Register a workflow from the workflow store",
        response_model=Status,
        responses=openapi.failures(400, 404, 409, 500),
        openapi_extra=openapi.query_or_body(RegisterWorkflow),
    )
    async def register(request: Request) -> Response:
        parameters = parameters_of(RegisterWorkflow, await read_parameters(request, limit))
        order = WorkflowOrder(
            parameters.url or "",
            parameters.workflow_name,
            parameters.response_timeout,
            parameters.startup_timeout,
            parameters.s3_sse_kms,
        )
        workflow = await workflows.register(order)
        return json_answer(
            Status(status=f"Workflow {workflow.name} has been registered and scaled successfully.")
        )

    @router.get(
        "/workflows/{workflow}",
        summary="Describe it",
        response_model=DescribedWorkflows,
        responses=openapi.failures(404),
    )
    async def describe(workflow: WorkflowName) -> Response:
        return json_answer(DescribedWorkflows([describe_workflow(workflows.find(workflow))]))

    # Path segments after the name are ignored, as in TorchServe.
    @router.get("/workflows/{workflow}/{suffix:path}", include_in_schema=False)
    async def describe_with_suffix(workflow: WorkflowName, suffix: str) -> Response:
        return await describe(workflow)

    @router.delete(
        "/workflows/{workflow}",
        summary="Unregister it",
        response_model=Status,
        responses=openapi.failures(404, 408),
    )
    async def unregister(workflow: WorkflowName) -> Response:
        await workflows.unregister(workflow)
        return json_answer(Status(status=f'Workflow "{workflow}" unregistered'))

    return router
