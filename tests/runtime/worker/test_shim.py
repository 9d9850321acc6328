"""The package `ts` as workers see it. Contract section 5.8."""

from __future__ import annotations

import json
import sys

import pytest

from tsx_runtime.worker import shim

from .conftest import StartWorker

NAMES = {
    "ts.context": ["Context", "RequestProcessor"],
    "ts.handler_utils.timer": ["timed"],
    "ts.handler_utils.utils": ["import_class", "send_intermediate_predict_response"],
    "ts.metrics.caching_metric": ["CachingMetric"],
    "ts.metrics.dimension": ["Dimension"],
    "ts.metrics.metric": ["Metric"],
    "ts.metrics.metric_cache_errors": ["MetricsCacheKeyError"],
    "ts.metrics.metric_type_enum": ["MetricTypes"],
    "ts.protocol.otf_message_handler": ["send_intermediate_predict_response"],
    "ts.service": ["PredictionException"],
    "ts.torch_handler.base_handler": ["BaseHandler"],
    "ts.torch_handler.image_classifier": ["ImageClassifier"],
    "ts.torch_handler.unit_tests.test_utils.mock_context": ["MockContext"],
    "ts.torch_handler.vision_handler": ["VisionHandler"],
    "ts.utils.util": [
        "PredictionException",
        "check_valid_pt2_backend",
        "list_classes_from_module",
        "load_label_mapping",
        "map_class_to_label",
    ],
    "ts.version": ["__version__"],
}


def test_every_carried_name_imports_in_a_worker(start_worker: StartWorker) -> None:
    imports = "\n".join(f"from {module} import {', '.join(names)}" for module, names in NAMES.items())
    worker = start_worker(
        f"{imports}\nimport ts\nfrom tsx_runtime.worker import exceptions\n"
        "def handle(data, context):\n"
        "    if data is not None:\n"
        "        return [[ts.__version__, type(context) is Context, PredictionException is exceptions.PredictionException]]\n"
    )
    assert worker.loaded, worker.report
    assert json.loads(worker.ask(b"")[0].body) == ["0.12.0", True, True]


def test_the_list_of_carried_modules_is_complete() -> None:
    assert shim.carried() == sorted(NAMES)


def test_nothing_of_it_is_seen_outside_of_workers() -> None:
    assert "ts" not in sys.modules
    assert shim.ShimFinder not in sys.meta_path


def test_small_tools_work_as_handlers_expect(start_worker: StartWorker) -> None:
    worker = start_worker("""
        import json
        from ts.handler_utils.utils import import_class
        from ts.torch_handler.unit_tests.test_utils.mock_context import MockContext
        from ts.utils.util import check_valid_pt2_backend, list_classes_from_module
        import ts.context

        def handle(data, context):
            if data is None:
                return
            mock = MockContext(model_pt_file="a.pt", model_dir="/d", model_name="n", gpu_id=None)
            mock.explain = True
            return [{
                "prefixed": import_class("JSONDecoder", "json").__name__,
                "dotted": import_class("json.JSONEncoder").__name__,
                "classes": [kind.__name__ for kind in list_classes_from_module(json.decoder)],
                "backends": [check_valid_pt2_backend("eager"), check_valid_pt2_backend("no_such_backend")],
                "mock": [mock.system_properties["model_dir"], mock.manifest["model"], mock.get_request_header(0, "explain"),
                         mock.get_request_header(0, "describe"), mock.model_yaml_config],
            }]
    """)
    assert json.loads(worker.ask(b"")[0].body) == {
        "prefixed": "JSONDecoder",
        "dotted": "JSONEncoder",
        "classes": ["JSONDecodeError", "JSONDecoder"],
        "backends": [True, False],
        "mock": ["/d", {"modelName": "n", "serializedFile": "a.pt"}, "True", None, {}],
    }


@pytest.mark.parametrize("name", ["NoSuchClass", "json.NoSuchClass"])
def test_a_class_that_is_not_there_is_an_import_error(name: str) -> None:
    from tsx_runtime.worker.ts.handler_utils.utils import import_class

    with pytest.raises(ImportError, match="NoSuchClass"):
        import_class(name)
