"""A small model with two forms: one that no machine supports, and one for every CPU."""

from __future__ import annotations

import platform
from pathlib import Path

from tests.support.models import make_model
from tsx_archiver.metadata.forms import FORMS_FILE, FormIndex, FormRecord

HANDLER = """
import torch
from ts.torch_handler.base_handler import BaseHandler


class Doubling(BaseHandler):
    def initialize(self, context):
        self.context, self.manifest, self.device = context, context.manifest, torch.device("cpu")
        self.model = self.in_form(self.load)
        self.initialized = True

    def load(self):
        model = torch.nn.Conv2d(1, 1, 1, bias=False)
        torch.nn.init.constant_(model.weight, 2)
        return model.eval()

    def preprocess(self, data):
        return torch.tensor([[[[float(row["body"])]]] for row in data])

    def postprocess(self, output):
        return [f"{value:g} by {self.form}" for value in output.flatten().tolist()]
"""
HERE = {"device": "cpu", "machine": platform.machine()}
FORMS = FormIndex(
    (FormRecord("int8-static", HERE | {"cpu": ["avx1024"]}), FormRecord("channels-last", HERE))
)
REASON = "int8-static: it was built for a CPU with avx1024, which this one lacks"


def doubling(directory: Path, forms: str = "[int8-static, channels-last]") -> Path:
    """Write a model that doubles the number in a request, and its form."""
    make_model(directory, HANDLER, config=f"forms: {forms}\n")
    (directory / FORMS_FILE).write_bytes(FORMS.content())
    return directory
