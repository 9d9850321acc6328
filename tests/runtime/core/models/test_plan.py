"""The plan of a version, resolved from registration, archive and settings."""

from __future__ import annotations

import pytest

from tsx_archiver import parse_model_config
from tsx_runtime.core.models.plan import (
    HandlerDefaults,
    RegisterOrder,
    check_workers,
    plan,
    unset_values,
    with_model_settings,
)
from tsx_runtime.core.placement.hardware import visible_names
from tsx_runtime.errors import BadRequest
from tsx_runtime.settings.schema import ModelSettings, Settings
from tsx_runtime.settings.torchserve import VersionSettings


def make_plan(register_options=None, yaml=None, settings=None, gpus=0, **options):
    config, _ = parse_model_config(yaml or {})
    registration = RegisterOrder(url="m.mar", **(register_options or {}))
    return plan(registration, config, Settings(**(settings or {})), gpus, **options)


def make_order(settings: ModelSettings, **values) -> RegisterOrder:
    """Return the registration options, completed from the settings of the model."""
    return with_model_settings(RegisterOrder(url="m.mar", **values), settings)


def test_registration_overrides_archive_and_archive_overrides_settings():
    settings = {"default_response_timeout": 7}
    assert make_plan(settings=settings).response_timeout == 7
    assert make_plan(yaml={"responseTimeout": 8}, settings=settings).response_timeout == 8
    assert (
        make_plan({"response_timeout": 9}, {"responseTimeout": 8}, settings).response_timeout == 9
    )


def test_a_handler_has_other_defaults():
    defaults = HandlerDefaults({"batch_size": 32})

    def batch_size(register_options=None, yaml=None):
        return make_plan(register_options, yaml, defaults=defaults).batch_size

    assert batch_size() == 32
    assert batch_size(yaml={"batchSize": 4}) == 4
    assert batch_size({"batch_size": 1}, {"batchSize": 4}) == 1


def test_each_recycling_limit_is_resolved_separately():
    settings = {"max_worker_requests": 10, "max_worker_memory": 20, "max_worker_age": 30}
    assert make_plan().recycling == (0, 0, 0)
    assert make_plan(settings=settings).recycling == (10, 20, 30)
    assert make_plan(
        yaml={"maxWorkerRequests": 0, "maxWorkerAge": 31}, settings=settings
    ).recycling == (0, 20, 31)
    model_settings = ModelSettings(max_worker_age=6, max_worker_memory=7)
    register_options = make_order(model_settings, max_worker_age=5)
    limits = (
        register_options.max_worker_requests,
        register_options.max_worker_memory,
        register_options.max_worker_age,
    )
    assert limits == (None, 7, 5)


@pytest.mark.parametrize(
    ("count", "cores", "allowed"), [(64, 2, 0), (160, 10, 0), (65, 2, 65), (1024, 2, 10**7)]
)
def test_worker_counts_within_the_cores_or_max_workers_are_accepted(count, cores, allowed):
    check_workers(count, "m", cores, allowed)


@pytest.mark.parametrize(("count", "cores", "allowed"), [(65, 2, 0), (161, 10, 0), (66, 2, 65)])
def test_an_excessive_worker_count_is_refused_with_the_setting_that_allows_it(
    count, cores, allowed
):
    with pytest.raises(BadRequest, match=rf"maxWorkers: {count} .*max_workers = {count}"):
        check_workers(count, "m", cores, allowed)


@pytest.mark.parametrize(
    ("register_options", "yaml", "gpus", "workers"),
    [
        # A registration without workers is scaled by a later call.
        ({}, {}, 0, (0, 0)),
        ({"loaded_at_startup": True}, {}, 0, (1, 1)),
        ({"loaded_at_startup": True}, {}, 4, (4, 4)),
        ({"loaded_at_startup": True}, {"deviceType": "cpu"}, 4, (1, 1)),
        ({"loaded_at_startup": True, "device_type": "cpu"}, {}, 4, (1, 1)),
        ({}, {"minWorkers": 2, "maxWorkers": 3}, 0, (2, 3)),
        ({}, {"minWorkers": 2}, 0, (2, 2)),
        ({}, {"minWorkers": 3, "maxWorkers": 1}, 0, (0, 0)),
        ({"initial_workers": 5}, {"minWorkers": 2}, 0, (5, 5)),
        ({"initial_workers": 0}, {"minWorkers": 2}, 0, (0, 0)),
        ({"initial_workers": 1, "max_workers": 3}, {}, 0, (1, 3)),
        ({"max_workers": 3}, {"minWorkers": 2, "maxWorkers": 2}, 0, (2, 3)),
        ({"initial_workers": 2, "max_workers": 1}, {}, 0, (2, 2)),
        ({}, {"scaleToZero": "10m"}, 0, (0, 1)),
    ],
)
def test_the_initial_worker_limits_of_a_model(register_options, yaml, gpus, workers):
    version_plan = make_plan(register_options, yaml, gpus=gpus)
    assert (version_plan.min_workers, version_plan.max_workers) == workers


def test_model_settings_set_worker_limits_and_scale_to_zero():
    model_settings = ModelSettings(workers=1, max_workers=4, scale_to_zero="10m")
    config, _ = parse_model_config({"scaleToZero": 30})
    version_plan = plan(make_order(model_settings), config, Settings(), 0)
    assert (version_plan.min_workers, version_plan.max_workers, version_plan.scale_to_zero) == (
        1,
        4,
        600.0,
    )
    never_unloaded = plan(make_order(ModelSettings(scale_to_zero=0)), config, Settings(), 0)
    assert never_unloaded.scale_to_zero == 0


def test_sizes_and_durations_accept_units():
    assert Settings(model_memory="8GB").model_memory == 8 * 10**9
    for invalid_values in ({"model_memory": "much"}, {"models": {"m": {"scale_to_zero": "soon"}}}):
        with pytest.raises(ValueError, match="such as"):
            Settings(**invalid_values)


@pytest.mark.parametrize(
    ("yaml", "conflict"),
    [
        ({"slo": "p99<1s"}, "slo"),
        ({"sequenceBatching": True, "sequenceMaxIdleMSec": 1}, "sequenceBatching"),
        ({"useJobTicket": True}, "useJobTicket"),
        ({"continuousBatching": True}, "continuousBatching or asyncCommunication"),
    ],
)
def test_split_rows_excludes_incompatible_options(yaml, conflict):
    assert make_plan(yaml={"splitRows": 8}).strategy.split_rows == 8
    with pytest.raises(BadRequest, match=f"splitRows .* {conflict}"):
        make_plan(yaml={"splitRows": 8, **yaml})


def test_batches_wait_only_with_the_batch_policy_wait():
    assert not make_plan(yaml={"batchSize": 4, "maxBatchDelay": 500}).wait
    assert make_plan(yaml={"batchSize": 4, "batchPolicy": "wait"}).wait


def test_the_first_source_chooses_between_slo_and_batch_settings():
    assert make_plan(yaml={"slo": "p99<50ms"}).slo == "p99<50ms"
    assert make_plan({"slo": "p95<1s"}, {"slo": "p99<50ms"}).slo == "p95<1s"
    assert make_plan({"slo": "p95<1s"}, {"batchSize": 4}).slo == "p95<1s"
    assert make_plan({"batch_size": 4}, {"slo": "p99<50ms"}).slo is None
    assert make_plan({"batch_size": 4}, {"slo": "p99<50ms"}).limits.max_items == 4
    bounds = make_plan(yaml={"slo": "p99<50ms"}).bounds
    assert bounds.slo is not None
    assert (bounds.slo.quantile, bounds.slo.seconds) == (0.99, 0.05)
    assert make_plan().bounds.slo is None


@pytest.mark.parametrize(
    ("register_options", "yaml", "conflict"),
    [
        ({"slo": "p99<1s", "batch_size": 2, "max_batch_delay": 3}, {}, "batchSize, maxBatchDelay"),
        ({}, {"slo": "p99<1s", "jobQueueSize": 2}, "jobQueueSize"),
        ({"slo": "p99<1s"}, {"batchPolicy": "wait"}, "batchPolicy"),
        (
            {"slo": "p99<1s"},
            {"sequenceBatching": True, "sequenceMaxIdleMSec": 1000},
            "sequenceBatching",
        ),
        (
            {"slo": "p99<1s"},
            {"continuousBatching": True},
            "continuousBatching or asyncCommunication",
        ),
        ({"slo": "p99<1s"}, {"useJobTicket": True}, "useJobTicket"),
    ],
)
def test_an_slo_and_batch_settings_of_one_source_are_refused(register_options, yaml, conflict):
    with pytest.raises(BadRequest, match=f"p99<1s stands in place of {conflict}"):
        make_plan(register_options, yaml)


def test_an_slo_and_batch_settings_override_each_other_across_sources():
    batch_settings, target = (
        ModelSettings(batch_size=4, max_batch_delay=5),
        ModelSettings(slo="p99<1s"),
    )
    assert make_order(batch_settings, slo="p99<1s").batch_size is None
    assert make_order(batch_settings, batch_size=2).max_batch_delay == 5
    assert make_order(target, batch_size=2).slo is None
    assert make_order(target).slo == "p99<1s"
    register_options = RegisterOrder(url="m.mar", slo="p99<1s")
    assert unset_values(register_options, {"batch_size": 4, "response_timeout": 9}) == {
        "response_timeout": 9
    }


@pytest.mark.parametrize(
    ("value", "count"),
    [("", 0), ("-1", 0), ("0", 1), ("0,1", 2), ("1,-1,2", 1), ("GPU-8f,GPU-9e", 2), ("0,,1", 1)],
)
def test_visible_devices_are_counted_as_cuda_does(value, count):
    assert len(visible_names(value)) == count


def test_config_properties_override_defaults_but_not_the_archive():
    names = [
        "min_workers",
        "max_workers",
        "batch_size",
        "max_batch_delay",
        "response_timeout",
        "startup_timeout",
    ]
    config_keys = [
        "minWorkers",
        "maxWorkers",
        "batchSize",
        "maxBatchDelay",
        "responseTimeout",
        "startupTimeout",
    ]
    version_settings = VersionSettings(**dict(zip(names, range(2, 8), strict=True)))
    settings = {"default_workers_per_model": 9}

    def limits(register_options=None, yaml=None):
        version = make_plan(register_options, yaml, settings, version_settings=version_settings)
        return [getattr(version, name) for name in names]

    assert limits() == [2, 3, 4, 5, 6, 7]
    yaml = dict.fromkeys(config_keys, 8)
    assert limits(yaml=yaml) == [8] * 6
    register_options = {"initial_workers": 0, "max_workers": 2, "batch_size": 1}
    assert limits(register_options, yaml)[:3] == [0, 2, 1]


def test_the_default_worker_count_of_a_start_applies_to_models_without_one():
    start = {"loaded_at_startup": True, "default_workers": 3}
    assert make_plan(start).min_workers == 3
    assert make_plan(start, settings={"default_workers_per_model": 2}).min_workers == 2
    assert make_plan(start, gpus=4).min_workers == 4
    assert make_plan({"default_workers": 3}).min_workers == 0
