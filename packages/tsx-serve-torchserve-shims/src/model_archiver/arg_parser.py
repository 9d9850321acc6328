"""`ArgParser`, a parser for the flags of torch-model-archiver."""

from __future__ import annotations

from tsx_archiver.torch_model_archiver import parser


class ArgParser:
    """The flags of torch-model-archiver, for scripts that parse these flags themselves."""

    export_model_args_parser = staticmethod(parser)
