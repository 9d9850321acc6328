"""The defaults of Hugging Face models."""

from __future__ import annotations

from tsx_runtime.features.huggingface.feature import task_workers


def test_small_models_of_tasks_get_one_worker_per_core_up_to_four() -> None:
    assert [task_workers(1 << 30, cores) for cores in (1, 2, 16)] == [1, 2, 4]
    assert task_workers((1 << 30) + 1, 16) is None
