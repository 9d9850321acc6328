"""The forms of an archive that a deployment can run, and the extras that its image needs for them.

These are pure functions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from tsx_archiver.metadata.forms import FormRecord
from tsx_cli.deploy.spec import GPU, NEURON

DEVICES = {NEURON: "AWS's Neuron accelerators (inf2, trn1)", GPU: "GPUs", "cpu": "CPUs"}
MACHINES = {"x86_64": "linux/amd64", "aarch64": "linux/arm64"}


class ImagePlatform(NamedTuple):
    """The properties of an image that decide whether a form runs in it."""

    device: str  # a key of DEVICES
    torch: str  # release of torch, such as 2.13
    machine: str = ""  # such as linux/amd64


def mismatch(form: FormRecord, image: ImagePlatform) -> str | None:
    """Return the reason why a server in an image does not use a form, or None if it may."""
    bound, device = form.bound, device_of(form)
    # A form for the CPU also runs in an image for Neuron: such a machine has a CPU, too.
    if device != image.device and (device, image.device) != ("cpu", NEURON):
        return (
            f"it runs on {DEVICES.get(device, device)}, and the image is for"
            f" {DEVICES[image.device]}"
        )
    machine = MACHINES.get(str(bound.get("machine")))
    if machine and image.machine and machine != image.machine:
        return f"it was built for {machine}, and the image is for {image.machine}"
    if "torch" in bound and bound["torch"] != image.torch:
        return f"it was built with torch {bound['torch']}, and the image has torch {image.torch}"
    return None


def device_of(form: FormRecord) -> str:
    """Return the device of a form.

    A form for Neuron accelerators records the CPU as its device, because torch runs there.
    """
    packages = form.bound.get("packages")
    return (
        NEURON
        if isinstance(packages, Mapping) and "torch_neuronx" in packages
        else str(form.bound.get("device"))
    )


def form_extras(
    forms: Sequence[FormRecord], image: ImagePlatform, allowed: Collection[str]
) -> dict[str, str]:
    """Return the extras of tsx-serve that an image needs, each with a form that needs it.

    Only extras in `allowed` are returned, because anybody may have written the archive.
    """
    pairs = [
        (extra, form.name)
        for form in forms
        if mismatch(form, image) is None
        for extra in _list(form.bound.get("extras"))
    ]
    return {
        extra: name
        for extra, name in reversed(pairs)
        if isinstance(extra, str) and extra in allowed
    }


def form_notes(forms: Sequence[FormRecord], image: ImagePlatform) -> list[str]:
    notes = []
    for form in forms:
        reason = mismatch(form, image)
        if reason is not None:
            notes.append(f"the form {form.name} is not used: {reason}")
        elif required_hardware := [
            *_list(form.bound.get("cpu")),
            *([form.bound["gpu"]] if "gpu" in form.bound else []),
        ]:
            notes.append(
                f"the form {form.name} is used only on machines with"
                f" {', '.join(map(str, required_hardware))}"
            )
    return notes


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
