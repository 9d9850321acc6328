from __future__ import annotations

from pathlib import Path

import torch

from tests.runtime.worker.forms.kinds.subjects import images, texts, tied
from tests.support.forms import compared, subject_of, tensor_inputs
from tsx_runtime.worker.forms.kinds import known_forms


def test_it_answers_as_the_model_does_and_takes_images_of_any_memory_format(tmp_path: Path) -> None:
    found = compared(known_forms()["aotinductor"], images, tensor_inputs(3, 9, 9), tmp_path)
    assert found.worst < 1e-5
    turned = torch.randn(4, 3, 9, 9).to(memory_format=torch.channels_last)
    torch.testing.assert_close(found.loaded.model(turned), images()(turned), rtol=1e-4, atol=1e-4)


def test_in_bf16_it_takes_several_tensors_and_gives_float32(tmp_path: Path) -> None:
    found = compared(known_forms()["aotinductor-bf16"], tied, texts, tmp_path)
    assert 0 < found.worst < 0.02
    args, kwargs = texts(2)
    assert found.loaded.model(*args, **kwargs)["logits"].dtype == torch.float32


def test_it_does_not_apply_to_torchscript() -> None:
    subject = subject_of(torch.jit.script(images()), tensor_inputs(3, 9, 9))
    assert (known_forms()["aotinductor"].applies(subject) or "").startswith("the model is TorchScript")
