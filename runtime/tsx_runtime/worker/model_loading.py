"""The loading of a worker's model, with its devices, directory, handler and warm-up."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tsx_runtime.wire import SEQUENCE_HEADERS, LoadOrder
from tsx_runtime.worker.exceptions import LoadError
from tsx_runtime.worker.execution import step_times
from tsx_runtime.worker.execution.batch import ServedModel
from tsx_runtime.worker.execution.micro_batching import with_micro_batches
from tsx_runtime.worker.execution.prefetch import can_overlap_steps
from tsx_runtime.worker.execution.recovery import Ceiling
from tsx_runtime.worker.execution.thread_tuning import make_tuning
from tsx_runtime.worker.execution.warmup import warm_up
from tsx_runtime.worker.handler_api import ts_shim
from tsx_runtime.worker.handler_api.context import Context
from tsx_runtime.worker.handler_api.loader import Coroutines, LoadedHandler, load_entry
from tsx_runtime.worker.handler_api.metrics import Metrics, PredictionTime
from tsx_runtime.worker.handler_api.modules import own_modules
from tsx_runtime.worker.handlers.models.compiler_cache import protect_compiler_cache

INPUT_KINDS = ("image", "text", "json", "file", "chat")

logger = logging.getLogger("tsx.worker")


def load_model(order: LoadOrder) -> ServedModel:
    """Load the handler of a model, and let it load the model.

    Raises:
        LoadError: The model cannot be loaded.
        BaseException: The handler raised an error that is not an `Exception`.
    """
    model_dir = Path(order["model_dir"])
    _apply_resources(order)
    _enter_directory(model_dir)
    ts_shim.install()
    _limit_threads(order["threads"])
    metrics = Metrics(order["model_name"])
    metrics.declare(order["model_metrics"])
    context = Context(
        order["model_name"],
        order["model_dir"],
        order["manifest"],
        order["batch_size"],
        assigned_gpu(order),
        order["server_version"],
        order["limit_max_image_pixels"],
        metrics,
        yaml.safe_load(order["model_config"]),
    )
    context.system_properties.update(order["properties"], worker=order["worker"])
    context.envelope = order["envelope"]
    context.json_nan, context.guess_content_type = order["json_nan"], order["guess_content_type"]
    coroutines = Coroutines()
    loaded_handler = load_entry(order["handler"], model_dir, context, coroutines)
    entry = with_micro_batches(loaded_handler, context)
    if context.envelope in getattr(entry.instance, "own_envelopes", ()):
        context.envelope = ""
    if context.envelope:
        entry = _add_envelope(entry, context.envelope, coroutines)
    has_steps = step_times.measure_steps(entry.instance)
    for key, attributes, call in (
        # With a form, the precision applies only to the original model, which may be loaded later.
        ("precision", ("form", "precision"), "self.in_precision(self.model)"),
        ("forms", ("form",), "self.in_form(load)"),
    ):
        if context.model_yaml_config.get(key) is not None and not any(
            text_attribute(entry.instance, name) for name in attributes
        ):
            logger.warning(
                "%s in model-config.yaml has no effect: %s does not apply it. In its initialize,"
                " call `self.model = %s`, a method of BaseHandler, or remove the key.",
                key,
                entry.name,
                call,
            )
    if order["mode"] == "async" and context.envelope:
        raise LoadError(
            "asyncCommunication and service_envelope exclude each other: requests would run one"
            " after the other. Remove one."
        )
    is_single_process, is_batched = order["ranks"] == 1, order["mode"] == "batch"
    model = ServedModel(
        entry,
        context,
        coroutines,
        order["decode_input_request"] and not getattr(entry.instance, "takes_raw_bodies", False),
        order["max_response_size"],
        Ceiling(),
        metrics,
        # A retry on one rank would not be made on the others.
        retry=is_single_process
        and context.model_yaml_config.get("retryFailedBatch", not order["stateful"]) is not False,
        response_timeout=order["response_timeout"],
        worker=order["worker"],
        is_single_process=is_single_process,
        prediction_time=PredictionTime(metrics),
        version=order["model_version"],
        has_tensor_envelope=context.envelope == "kservev2",
        mode=order["mode"],
        thread_tuning=(
            make_tuning(order["threads"], is_tuning=is_batched)
            if order["shares_cores"] and order["threads"]
            else None
        ),
        error_status=order["handler_error_status"],
        has_steps=has_steps,
        is_builtin=type(entry.instance).__module__.startswith("tsx_runtime.")
        and not getattr(entry.instance, "takes_repeated_fields", False),
        cost=_find_cost_function(loaded_handler) if order["max_batch_cost"] else None,
        max_cost=order["max_batch_cost"],
    )
    return model._replace(
        stops_for_gone_clients=is_batched
        and is_single_process
        and not order["stateful"]
        and not can_overlap_steps(model)
    )


def _find_cost_function(entry: LoadedHandler) -> Callable[[Any], float] | None:
    """Return the function `cost(request)` of the handler's class or module, if it has one."""
    functions = getattr(entry.call, "__globals__", {})
    cost = (
        functions.get("cost") if entry.instance is None else getattr(entry.instance, "cost", None)
    )
    return cost if callable(cost) else None


def _add_envelope(entry: LoadedHandler, envelope: str, coroutines: Coroutines) -> LoadedHandler:
    from tsx_runtime.worker.codecs.envelopes import ENVELOPES  # Few models have an envelope.

    if envelope not in ENVELOPES:
        raise LoadError(
            f"There is no envelope {envelope!r}: service_envelope is one of {', '.join(ENVELOPES)}."
        )
    wrapper = ENVELOPES[envelope](
        lambda data, context: coroutines.finish(entry.call(data, context))
    )
    return entry._replace(call=wrapper.handle)


def warm_up_model(model: ServedModel, order: LoadOrder) -> None:
    """Send the requests of the model's `warmup` to its handler."""
    if not model.context.model_yaml_config.get("warmup"):
        return
    from tsx_archiver import parse_model_config  # It imports pydantic.

    # Errors were reported at the registration already.
    config, _ = parse_model_config(model.context.model_yaml_config)
    warm_up(
        model,
        config,
        Path(order["model_dir"]),
        order["batch_size"],
        SEQUENCE_HEADERS if order["stateful"] else None,
    )


def describe_model(model: ServedModel, order: LoadOrder) -> dict[str, Any]:
    """Return the properties of a loaded model that the front end needs."""
    handler = model.entry.instance
    return {
        "device": find_device(handler, order),
        "prefetch": model.mode == "batch" and can_overlap_steps(model),
        "input": find_input_kind(handler),
        "example": has_example(handler),
        "signature": getattr(handler, "signature", None),
        "monitor_fields": getattr(handler, "monitor_fields", None),
        "precision": text_attribute(handler, "precision"),
        "form": text_attribute(handler, "form"),
        "forms_passed_over": list(getattr(handler, "forms_passed_over", ())),
    }


def text_attribute(instance: Any, name: str) -> str | None:
    """Return a text attribute of the handler, such as the applied `precision` or `form`.

    The result is None if nothing is configured, or if the handler ignores the setting.
    """
    value = getattr(instance, name, None)
    return value if isinstance(value, str) else None


def find_device(instance: Any, order: LoadOrder) -> str:
    """Return the handler's `device`, or the assigned device if it has none."""
    device = getattr(instance, "device", None)
    if device is not None:
        return str(device)
    gpu = assigned_gpu(order)
    return "cpu" if gpu is None else f"cuda:{gpu}"


def find_input_kind(instance: Any) -> str | None:
    """Return the handler's `input_kind`, which selects the form on the server's page."""
    kind = getattr(instance, "input_kind", "json" if has_example(instance) else None)
    return kind if kind in INPUT_KINDS else None


def has_example(instance: Any) -> bool:
    """Tell whether the handler's `describe_handle` has an example of a request.

    `BaseHandler` has an example for a model that takes tensors.
    """
    return getattr(instance, "_takes_tensors", False) is True


def assigned_gpu(order: LoadOrder) -> int | None:
    """Return the GPU of this process, as an index of its visible GPUs.

    The ranks of a group divide the worker's GPUs among them, in order.
    """
    if order["gpu_id"] is None or order["ranks"] == 1:
        return order["gpu_id"]
    return int(os.environ["LOCAL_RANK"]) * max(1, order["gpus"] // order["ranks"])


def _apply_resources(order: LoadOrder) -> None:
    """Apply the assigned cores and devices, before libraries read their numbers."""
    os.environ.update(order["variables"])
    protect_compiler_cache()
    if order["cores"] is not None and hasattr(os, "sched_setaffinity"):
        try:
            os.sched_setaffinity(0, order["cores"])
        except OSError as error:
            logger.warning(
                "the worker cannot be pinned to the cores %s: %s", order["cores"], error.strerror
            )


def _enter_directory(model_dir: Path) -> None:
    """Change to the model's directory, so that handlers can open and import its files."""
    try:
        os.chdir(model_dir)
    except OSError as error:
        raise LoadError(
            f"The model's directory {model_dir} cannot be entered: {error.strerror}."
        ) from error
    own_modules.enter(model_dir)


def _limit_threads(threads: int | None) -> None:
    """Limit the threads of torch, which reads the environment only when it is imported."""
    if threads is None:
        return
    torch = sys.modules.get("torch")
    if torch is None:
        os.environ.update(OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads))
    elif torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
