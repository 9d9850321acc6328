"""Objects of TorchServe's `ts` that tests of handlers use, but not tsx itself."""

from __future__ import annotations

import enum
from importlib.util import find_spec
from pathlib import Path

import yaml

from tsx_runtime.worker.exceptions import MetricsCacheKeyError
from tsx_runtime.worker.handler_api.metrics import CachingMetric, Metrics, MetricTypes

PREDICTION_METRIC = "PredictionTime"
PROFILER_AVAILABLE = PT2_AVAILABLE = PT230_AVAILABLE = True
IPEX_AVAILABLE = XLA_AVAILABLE = False  # tsx supports neither.
ONNX_AVAILABLE = find_spec("onnxruntime") is not None


class GeneralMetricsCacheError(Exception):
    """A metrics file does not have the expected form."""


class MetricsCacheIOError(OSError):
    """A metrics file cannot be read."""


class MetricsCachePyYamlError(yaml.YAMLError):
    """A metrics file is not YAML."""


class MetricsCacheYamlImpl(Metrics):
    """A `context.metrics` for tests, to which `initialize_cache` adds metrics of a metrics.yaml.

    Raises:
        MetricsCacheIOError: The file cannot be read.
        MetricsCachePyYamlError: The file is not YAML.
    """

    def __init__(self, config_file_path: str | Path) -> None:
        super().__init__()
        self.config_file_path = config_file_path
        try:
            self._content = yaml.safe_load(Path(config_file_path).read_text("utf-8"))
        except OSError as error:
            raise MetricsCacheIOError(
                f"The metrics file {config_file_path} cannot be read: {error.strerror}"
            ) from error
        except yaml.YAMLError as error:
            raise MetricsCachePyYamlError(
                f"The metrics file {config_file_path} is not YAML: {error}"
            ) from error

    def initialize_cache(self) -> None:
        """Add the metrics of the section `model_metrics`.

        Raises:
            MetricsCacheKeyError: The section, or a metric's name or unit, is missing.
            GeneralMetricsCacheError: The section is not a list of metrics for each type.
        """
        try:
            for kind, metrics in self._content["model_metrics"].items():
                for metric in metrics:
                    self.add_metric_to_cache(
                        metric["name"], metric["unit"], metric.get("dimensions"), kind
                    )
        except KeyError as error:
            raise MetricsCacheKeyError(
                f"The metrics file {self.config_file_path} has no key {error}"
            ) from error
        except (AttributeError, TypeError) as error:
            raise GeneralMetricsCacheError(
                f"The metrics file {self.config_file_path} must have the form `model_metrics:"
                f" {{counter: [{{name: NAME, unit: UNIT, dimensions: [NAME]}}]}}`: {error}"
            ) from error

    def cache_keys(self) -> dict[MetricTypes, dict[str, CachingMetric]]:
        """Return the metrics by type and name."""
        return self.cache


_BACKENDS = (
    "eager aot_eager inductor nvfuser aot_nvfuser aot_cudagraphs ofi fx2trt onnxrt ipex"
    " torchxla_trace_once openvino tensorrt hpu_backend"
)
# The backends of torch.compile that TorchServe names.
PT2Backend = enum.Enum("PT2Backend", {name.upper(): name for name in _BACKENDS.split()}, type=str)  # type: ignore[misc]  # mypy takes only literals
