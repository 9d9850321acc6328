"""A real image, built without a daemon or a public registry. `pytest -m image` runs it.

debootstrap makes the base, buildah builds like `tsx deploy`, and pip has this machine's settings.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import psutil
import pytest

from tests.support.containers import run
from tests.support.servers import DEADLINE, tsx
from tsx_cli.deploy.container.kinds import PushedImage
from tsx_cli.deploy.engine.facts import Facts, read_archive
from tsx_cli.deploy.engine.resources import Resource
from tsx_cli.deploy.image.local import this_machine
from tsx_cli.deploy.image.programs import Builder
from tsx_cli.deploy.image.recipe import UID, recipe
from tsx_cli.deploy.spec import DeploySpec

DIGITS = Path(__file__).parents[2] / "examples" / "digits"
NEEDED = ("buildah", "debootstrap", "docker-registry", "skopeo")
MISSING = [name for name in NEEDED if shutil.which(name) is None]
pytestmark = [
    pytest.mark.image,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}, which apt installs"),
    pytest.mark.skipif(
        not hasattr(os, "geteuid") or os.geteuid() != 0,
        reason="needs root, for debootstrap and for chroot",
    ),
]


@pytest.fixture(scope="module")
def registry(
    containers: Path,
    tmp_path_factory: pytest.TempPathFactory,
    free_ports: Callable[[int], list[int]],
) -> Iterator[str]:
    directory, (port,) = tmp_path_factory.mktemp("registry"), free_ports(1)
    registries = containers / "home/.config/containers/registries.conf"
    registries.write_text(f'[[registry]]\nlocation = "127.0.0.1:{port}"\ninsecure = true\n')
    config = {
        "version": 0.1,
        "storage": {"filesystem": {"rootdirectory": str(directory / "data")}},
        "http": {"addr": f"127.0.0.1:{port}"},
    }
    (directory / "config.json").write_text(json.dumps(config))  # JSON is valid YAML
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(
            ["docker-registry", "serve", directory / "config.json"], stdout=log, stderr=log
        )
    try:
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def test_the_image_is_built_pushed_pulled_and_answers(
    containers: Path,
    base: str,
    registry: str,
    tmp_path: Path,
    free_ports: Callable[[int], list[int]],
) -> None:
    arguments = [
        "archive",
        DIGITS / "digits.pth",
        "--model-file",
        DIGITS / "model.py",
        "--handler",
        DIGITS / "handler.py",
    ]
    packed = tsx([*arguments, "--config-file", DIGITS / "model-config.yaml"], tmp_path, {})
    assert packed.returncode == 0, packed.stderr
    inspection, sha256 = read_archive(tmp_path / "digits.mar")
    facts = Facts(
        tmp_path / "digits.mar",
        sha256,
        inspection.manifest.model_name,
        inspection.manifest.version,
        "",
        "",
        "",
    )
    build = {"tool": "buildah", "base": base, "torch_index": ""}
    spec = DeploySpec.model_validate(
        {"name": "digits", "target": "kubernetes", "model": facts.archive, "build": build}
    )
    with this_machine(spec) as local:
        assert local.wheel is not None, "tests run from a checkout"
        built = recipe(spec, facts, local)
        image = f"{registry}/digits:{built.tag}"
        kind = PushedImage(Builder("buildah"), built)
        assert kind.observe(None, image) is None
        kind.create(None, Resource("Image", "Tsx::Registry::Image", image, {}))
    assert PushedImage(Builder("buildah"), built).observe(None, image) is not None
    scores = json.loads(run("skopeo", "inspect", "--tls-verify=false", f"docker://{image}"))
    assert scores["Labels"]["tsx.model"] == f"{facts.model_name}/{facts.model_version}"
    layers = json.loads(
        run("skopeo", "inspect", "--tls-verify=false", "--raw", f"docker://{image}")
    )["layers"]
    sizes = ", ".join(f"{layer['size'] / 1e6:.1f}" for layer in layers)
    print(f"\n{image}: {scores['Digest']}; layers of {sizes} MB, packed")
    # The model is the last layer, so a new model changes only that one.
    assert layers[-1]["size"] < 1e6
    run("buildah", "rmi", "--force", image)
    serve(image, tmp_path, free_ports(3))


def serve(image: str, directory: Path, ports: list[int]) -> None:
    """Pull and run an image as a container runtime does, check its health, and stop it."""
    container = run("buildah", "from", "--pull-always", f"docker://{image}").strip()
    config = json.loads(run("buildah", "inspect", "--type", "image", image))["Docker"]["config"]
    assert config["User"] == str(UID)
    roles = zip(("INFERENCE", "MANAGEMENT", "METRICS"), ports, strict=True)
    environment = [f"--env=TSX_{role}_ADDRESS=http://127.0.0.1:{port}" for role, port in roles]
    inside = ["buildah", "run", *environment, container, "--"]
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(
            [*inside, *config["Entrypoint"], *config["Cmd"]], stdout=log, stderr=log
        )
    try:
        check = [*inside, *config["Healthcheck"]["Test"][1:]]
        deadline = time.monotonic() + DEADLINE * 2
        while subprocess.run(check, capture_output=True, check=False).returncode != 0:
            assert process.poll() is None, (directory / "log").read_text()
            assert time.monotonic() < deadline, (directory / "log").read_text()
            time.sleep(1)
        picture = (DIGITS / "images" / "7.png").read_bytes()
        url, kind = f"http://127.0.0.1:{ports[0]}/predictions/digits", {"Content-Type": "image/png"}
        with urlopen(Request(url, data=picture, headers=kind)) as answer:
            scores = json.loads(answer.read())
        print(f"7.png: {scores}")
        assert max(scores, key=scores.__getitem__) == "seven"
        assert run(*inside, "id", "-u").strip() == str(UID)
    finally:
        # The signal is sent directly, since buildah does not forward signals.
        for server in psutil.Process(process.pid).children(recursive=True):
            if server.cmdline()[1:] == [*config["Entrypoint"][1:], *config["Cmd"]]:
                server.terminate()
        code = process.wait(DEADLINE)
    assert code == 0, (directory / "log").read_text()
