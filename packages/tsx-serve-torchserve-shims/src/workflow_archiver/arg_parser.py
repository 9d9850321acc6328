"""`ArgParser`, which creates the parser of torch-workflow-archiver's flags."""

from __future__ import annotations

from tsx_archiver.workflow.command import parser


class ArgParser:
    """The flags of torch-workflow-archiver, for scripts that parse a command line."""

    workflow_archiver_args_parser = staticmethod(parser)
