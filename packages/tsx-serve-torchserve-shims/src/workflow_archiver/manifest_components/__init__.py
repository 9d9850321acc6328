"""A stand-in for the parts of a workflow's MANIFEST.json, which tsx creates itself."""

raise ModuleNotFoundError(
    "tsx does not include TorchServe's module 'workflow_archiver.manifest_components': "
    "use workflow_archiver.workflow_packaging_utils.WorkflowExportUtils.generate_manifest_json",
    name=__name__,
)
