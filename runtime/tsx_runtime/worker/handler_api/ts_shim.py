"""TorchServe's package `ts` for handlers, whose names are mapped to objects of tsx.

Workers install the package. For scripts, the distribution in `packages/` installs it. The server
and the commands have no `ts`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from itertools import accumulate
from types import ModuleType
from typing import NoReturn

# For each module of `ts`, the modules of tsx that define its names. `name=target` stands for a
# name that differs in tsx.
NAMES: dict[str, dict[str, str]] = {
    "ts": {"tsx_runtime.version": "__version__=TORCHSERVE_VERSION"},
    "ts.context": {"tsx_runtime.worker.handler_api.context": "Context RequestProcessor"},
    "ts.handler_utils.hf_batch_streamer": {
        "tsx_runtime.worker.codecs.text_streamer": "TextIteratorStreamerBatch"
    },
    "ts.handler_utils.micro_batching": {
        "tsx_runtime.worker.execution.micro_batching": "HANDLER_METHODS=STAGES MicroBatching",
        "tsx_runtime.worker.handler_api.ts_objects": "PROFILER_AVAILABLE",
    },
    "ts.handler_utils.text_utils": {
        "tsx_runtime.worker.handlers.steps.text_cleaning": "ngrams_iterator"
    },
    "ts.handler_utils.timer": {"tsx_runtime.worker.handlers.steps.timing": "timed"},
    "ts.handler_utils.utils": {
        "tsx_runtime.worker.handler_api.utils": "import_class",
        "tsx_runtime.worker.codecs.streaming": "send_intermediate_predict_response",
    },
    "ts.metrics.caching_metric": {"tsx_runtime.worker.handler_api.metrics": "CachingMetric"},
    "ts.metrics.dimension": {"tsx_runtime.worker.handler_api.metrics": "Dimension"},
    "ts.metrics.metric": {"tsx_runtime.worker.handler_api.metrics": "Metric MetricUnit"},
    "ts.metrics.metric_cache_errors": {
        "tsx_runtime.worker.exceptions": (
            "MetricsCacheKeyError MetricsCacheTypeError MetricsCacheValueError"
        ),
        "tsx_runtime.worker.handler_api.ts_objects": (
            "GeneralMetricsCacheError MetricsCacheIOError MetricsCachePyYamlError"
        ),
    },
    "ts.metrics.metric_cache_yaml_impl": {
        "tsx_runtime.worker.handler_api.ts_objects": "MetricsCacheYamlImpl"
    },
    "ts.metrics.metric_type_enum": {"tsx_runtime.worker.handler_api.metrics": "MetricTypes"},
    "ts.metrics.process_memory_metric": {
        "tsx_runtime.worker.handler_api.utils": "check_process_mem_usage get_cpu_usage"
    },
    "ts.metrics.unit": {"tsx_runtime.worker.handler_api.metrics": "Units"},
    "ts.protocol.otf_message_handler": {
        "tsx_runtime.worker.codecs.streaming": "send_intermediate_predict_response"
    },
    "ts.service": {
        "tsx_runtime.worker.exceptions": "PredictionException",
        "tsx_runtime.worker.handler_api.utils": "emit_metrics",
        "tsx_runtime.worker.handler_api.ts_objects": "PREDICTION_METRIC",
    },
    "ts.torch_handler.base_handler": {
        "tsx_runtime.worker.handlers.base": "BaseHandler",
        "tsx_runtime.worker.handler_api.ts_objects": (
            "IPEX_AVAILABLE ONNX_AVAILABLE PROFILER_AVAILABLE PT230_AVAILABLE PT2_AVAILABLE"
            " XLA_AVAILABLE"
        ),
    },
    "ts.torch_handler.densenet_handler": {
        "tsx_runtime.worker.handlers.base": "DenseNetHandler=BaseHandler",
        "tsx_runtime.worker.handler_api.loader": "list_classes_from_module=classes_of",
    },
    "ts.torch_handler.image_classifier": {
        "tsx_runtime.worker.handlers.image_classifier": "ImageClassifier"
    },
    "ts.torch_handler.image_segmenter": {
        "tsx_runtime.worker.handlers.image_segmenter": "ImageSegmenter"
    },
    "ts.torch_handler.object_detector": {
        "tsx_runtime.worker.handlers.object_detector": "ObjectDetector"
    },
    "ts.torch_handler.request_envelope.base": {
        "tsx_runtime.worker.codecs.envelopes": "BaseEnvelope"
    },
    "ts.torch_handler.request_envelope.body": {
        "tsx_runtime.worker.codecs.envelopes": "BodyEnvelope"
    },
    "ts.torch_handler.request_envelope.json": {
        "tsx_runtime.worker.codecs.envelopes": "JSONEnvelope"
    },
    "ts.torch_handler.request_envelope.kserve": {
        "tsx_runtime.worker.codecs.envelopes": "KServeEnvelope"
    },
    "ts.torch_handler.request_envelope.kservev2": {
        "tsx_runtime.worker.codecs.envelopes": "KServev2Envelope"
    },
    "ts.torch_handler.text_classifier": {
        "tsx_runtime.worker.handlers.text_classifier": "TextClassifier"
    },
    "ts.torch_handler.text_handler": {
        "tsx_runtime.worker.handlers.text": "TextHandler",
        "tsx_runtime.worker.handlers.steps.text_cleaning": "CLEANUP_REGEX",
    },
    "ts.torch_handler.unit_tests.test_utils.mock_context": {
        "tsx_runtime.worker.handler_api.testing": "MockContext"
    },
    "ts.torch_handler.unit_tests.test_utils.model_dir": {
        "tsx_runtime.worker.handler_api.testing": "copy_files download_model"
    },
    "ts.torch_handler.vision_handler": {"tsx_runtime.worker.handlers.vision": "VisionHandler"},
    "ts.utils.util": {
        "tsx_runtime.worker.exceptions": "PredictionException",
        "tsx_runtime.worker.handler_api.utils": "check_valid_pt2_backend get_yaml_config",
        "tsx_runtime.worker.handlers.steps.text_cleaning": "CLEANUP_REGEX",
        "tsx_runtime.worker.handlers.steps.labels": "load_label_mapping map_class_to_label",
        "tsx_runtime.worker.handler_api.loader": "list_classes_from_module=classes_of",
        "tsx_runtime.worker.handler_api.ts_objects": "PT2Backend",
    },
    "ts.version": {"tsx_runtime.version": "__version__=TORCHSERVE_VERSION"},
}
# Replacements for modules and names of `ts` that tsx does not include.
HINTS = {
    "use the command `torchserve` or `ts.launcher.start`": "ts.arg_parser ts.model_server",
    "declare `async def handle` and set `asyncCommunication: true`": "ts.async_service",
    "derive from BaseHandler, and call deepspeed.init_inference in `initialize`": (
        "ts.handler_utils.distributed.deepspeed ts.torch_handler.distributed.base_deepspeed_handler"
    ),
    "PiPPy is discontinued and does not run on torch 2.6; split the model with torch.distributed.pipelining, or distribute its layers with accelerate's `device_map`": (
        "ts.handler_utils.distributed.pt_pippy ts.torch_handler.distributed.base_pippy_handler"
    ),
    "MicroBatching has its own threads": (
        "ts.handler_utils.micro_batching.WorkerThread ts.handler_utils.micro_batching.execute_call"
    ),
    "derive from ts.torch_handler.image_classifier.ImageClassifier, and run the DALI pipeline in `preprocess`": (
        "ts.handler_utils.preprocess ts.torch_handler.dali_handler"
        " ts.torch_handler.dali_image_classifier"
    ),
    "use `TextHandler._tokenize`": "ts.handler_utils.text_utils.get_tokenizer",
    "`ts.launcher.start` returns a queue of the server's lines": (
        "ts.launcher.PrintTillTheEnd ts.launcher.Tee"
    ),
    "use `tsx serve DIRECTORY` or `tsx serve hf://ORG/MODEL`": "ts.llm_launcher",
    "use ts.metrics.caching_metric.CachingMetric": "ts.metrics.metric_abstract",
    "use `context.metrics`, or MetricsCacheYamlImpl in a test": (
        "ts.metrics.metric_cache_abstract ts.metrics.metrics_store"
    ),
    "read /metrics, or write a program for `system_metrics_cmd`": (
        "ts.metrics.metric_collector ts.metrics.system_metrics"
    ),
    "encode `metric.to_dict()`": "ts.metrics.metric_encoder",
    "test a handler with MockContext, or a server with tsx_runtime.testing": (
        "ts.model_loader ts.model_service_worker ts.protocol.otf_message_handler ts.service.Service"
        " ts.torch_handler.unit_tests"
    ),
    "derive from ts.torch_handler.base_handler.BaseHandler": "ts.model_service",
    "`BaseHandler` loads ONNX files itself": "ts.torch_handler.base_handler.setup_ort_session",
    "use `TextHandler._expand_contractions`": (
        "ts.torch_handler.contractions ts.torch_handler.text_handler.CONTRACTIONS_PATTERN"
    ),
    "`trtllm-serve` has the same OpenAI routes": "ts.torch_handler.trt_llm_handler",
    "use `tsx serve DIRECTORY`, with `huggingface: {engine: vllm}` in model-config.yaml": (
        "ts.torch_handler.vllm_handler"
    ),
    "use huggingface_hub.snapshot_download": "ts.utils.hf_utils",
    "set `useVenv: true` in model-config.yaml": "ts.utils.setup_model_venv",
    "use ts.handler_utils.timer.timed": "ts.utils.timeit_decorator",
    "use warnings.warn": "ts.utils.util.deprecated",
}
# Names that tsx leaves out of modules that it includes in part. Any other name raises an
# AttributeError, which pickle expects when it searches all modules for a function.
EXCLUDED = {
    "ts.protocol.otf_message_handler": (
        "END_OF_LIST LOAD_MSG PREDICT_MSG RESPONSE bool_size create_load_model_response "
        "create_predict_response encode_response_headers int_size retrieve_msg"
    ),
    "ts.torch_handler.unit_tests.test_utils.model_dir": "REPO_DIR",
}
REPLACEMENTS = {name: hint for hint, names in HINTS.items() for name in names.split()}
PACKAGES = {
    package for name in NAMES for package in accumulate(name.split(".")[:-1], "{}.{}".format)
}
# All modules of these two packages are in HINTS.
PACKAGES |= {"ts.handler_utils.distributed", "ts.torch_handler.distributed"}


class ShimFinder(MetaPathFinder, Loader):
    """The importer of `ts`; for a missing module it raises an error with a hint."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in NAMES or fullname in PACKAGES:
            spec = ModuleSpec(fullname, self, origin=__file__, is_package=fullname in PACKAGES)
            # With a location, `ts.__file__` shows that this `ts` belongs to tsx.
            spec.has_location = True
            return spec
        if fullname.startswith("ts."):
            hint = (
                find_replacement(fullname)
                or f"it includes {', '.join(sorted(NAMES.keys() - PACKAGES))}"
            )
            raise ModuleNotFoundError(
                f"tsx does not include TorchServe's module {fullname!r}: {hint}", name=fullname
            )
        return None

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__getattr__"] = partial(refuse, module.__name__)
        for source, names in NAMES.get(module.__name__, {}).items():
            source_module = importlib.import_module(source)
            for name, _, target in (entry.partition("=") for entry in names.split()):
                setattr(module, name, getattr(source_module, target or name))
                vars(module).setdefault("__all__", []).append(name)


def find_replacement(name: str) -> str | None:
    """Return the replacement for a name of `ts` that tsx does not include."""
    return next(
        (
            REPLACEMENTS[part]
            for part in accumulate(name.split("."), "{}.{}".format)
            if part in REPLACEMENTS
        ),
        None,
    )


def refuse(module: str, name: str) -> NoReturn:
    """Raise the error for a name that a module lacks.

    Raises:
        ImportError: TorchServe's module has the name, but tsx does not.
        AttributeError: TorchServe's module has no such public name.
    """
    path = f"{module}.{name}"
    if path in REPLACEMENTS or name in EXCLUDED.get(module, "").split():
        raise ImportError(
            f"tsx does not include TorchServe's {path}: {find_replacement(path)}", name=module
        )
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def install() -> None:
    """Install `ts` before any other finder, so that it hides an installed TorchServe.

    A second call changes nothing.
    """
    if not any(isinstance(finder, ShimFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, ShimFinder())
