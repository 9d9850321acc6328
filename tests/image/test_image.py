"""The image for real, without a daemon and without a registry of others: built, pushed, pulled, run, asked. `pytest -m image` runs it.

Its base is made by debootstrap, buildah builds it as `tsx deploy` has it build, and pip finds its packages where this machine's does.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from urllib.request import Request, urlopen

import psutil
import pytest

from tests.support.servers import DEADLINE, tsx
from tsx_cli.deploy.container.kinds import PushedImage
from tsx_cli.deploy.engine.facts import Facts, look_at
from tsx_cli.deploy.engine.resources import Resource
from tsx_cli.deploy.image.local import this_machine
from tsx_cli.deploy.image.programs import Builder
from tsx_cli.deploy.image.recipe import UID, recipe
from tsx_cli.deploy.spec import DeploySpec

DIGITS = Path(__file__).parents[2] / "examples" / "digits"
NEEDED = ("buildah", "debootstrap", "docker-registry", "skopeo")
MISSING = [name for name in NEEDED if shutil.which(name) is None]
BASE = "localhost/tsx-base:1"
LONG = 1800.0  # seconds

pytestmark = [
    pytest.mark.image,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}, which apt installs"),
    pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root, for debootstrap and for chroot"),
]


def run(*words: str | Path, environment: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=LONG, env=environment, check=False)
    assert done.returncode == 0, f"{' '.join(map(str, words))}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory, free_ports: Callable[[int], list[int]]) -> Iterator[str]:
    place, (port,) = tmp_path_factory.mktemp("registry"), free_ports(1)
    config = {"version": 0.1, "storage": {"filesystem": {"rootdirectory": str(place / "data")}}, "http": {"addr": f"127.0.0.1:{port}"}}
    (place / "config.json").write_text(json.dumps(config))  # YAML holds JSON
    with (place / "log").open("w") as log:
        process = subprocess.Popen(["docker-registry", "serve", place / "config.json"], stdout=log, stderr=log)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(scope="module")
def containers(tmp_path_factory: pytest.TempPathFactory, registry: str) -> Iterator[Path]:
    """Storage of its own, and what buildah has to know to do without rights over cgroups and without TLS."""
    place = tmp_path_factory.mktemp("containers")
    pip, mounts = pip_settings()
    (place / "pip.conf").write_text(pip)
    mounts = [f"{path}:{path}:ro" for path in mounts] + [f"{place / 'pip.conf'}:/etc/pip.conf:ro"]
    (place / "home/.config/containers").mkdir(parents=True)
    (place / "home/.config/containers/registries.conf").write_text(f'[[registry]]\nlocation = "{registry}"\ninsecure = true\n')
    (place / "containers.conf").write_text(f"[containers]\nvolumes = {json.dumps(mounts)}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(place / "home"))
        patch.setenv("PIP_CONFIG_FILE", str(place / "pip.conf"))
        patch.setenv("CONTAINERS_CONF", str(place / "containers.conf"))
        patch.setenv("CONTAINERS_STORAGE_CONF", str(place / "storage.conf"))
        patch.setenv("BUILDAH_ISOLATION", "chroot")
        for driver in ("overlay", "vfs"):  # which copies every layer, and works everywhere
            storage = f'[storage]\ndriver = "{driver}"\ngraphroot = "{place / driver}"\nrunroot = "{place / "run"}"\n'
            (place / "storage.conf").write_text(storage)
            if works():
                break
        try:
            yield place
        finally:
            run("buildah", "rm", "--all")  # what is mounted
            for driver in ("overlay", "vfs"):
                shutil.rmtree(place / driver, ignore_errors=True)


def works() -> bool:
    made = subprocess.run(["buildah", "from", "scratch"], capture_output=True, text=True, check=False)
    mount = ["buildah", "mount", made.stdout.strip()]
    return made.returncode == 0 and subprocess.run(mount, capture_output=True, check=False).returncode == 0


def pip_settings() -> tuple[str, list[Path]]:
    """This machine's, as one file, with the directories that it names."""
    listed = run(sys.executable, "-m", "pip", "config", "list")
    found = re.findall(r"^(?:global|install|:env:)\.([a-z-]+)='(.*)'$", listed, re.MULTILINE)
    text = "[global]\n" + "".join(f"{key} = {value}\n" for key, value in dict(found).items() if key != "config-file")
    named = {Path(path).parent for _, value in found for path in re.findall(r"file://(/\S+)", value)}  # an index has its files beside it
    named |= {Path(path) for _, value in found for path in re.findall(r"(?<!\S)/\S+", value)}
    return text, [Path("/etc/ssl/certs"), *sorted(path for path in named if path.exists() and not path.is_relative_to("/etc/ssl/certs"))]


@pytest.fixture(scope="module")
def base(containers: Path) -> str:
    """Debian with Python, in a minute."""
    root = containers / "base"
    packages = "python3-minimal,python3-venv,python3-pip,ca-certificates"
    run("debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", root)
    container = run("buildah", "from", "scratch").strip()
    run("buildah", "add", "--quiet", container, root, "/")
    run("buildah", "commit", "--quiet", "--format", "docker", container, BASE)
    run("buildah", "rm", container)
    shutil.rmtree(root)
    return BASE


def test_the_image_is_built_pushed_pulled_and_answers(
    containers: Path, base: str, registry: str, tmp_path: Path, free_ports: Callable[[int], list[int]]
) -> None:
    words = ["archive", DIGITS / "digits.pth", "--model-file", DIGITS / "model.py", "--handler", DIGITS / "handler.py"]
    packed = tsx([*words, "--config-file", DIGITS / "model-config.yaml"], tmp_path, {})
    assert packed.returncode == 0, packed.stderr
    inspection, sha256 = look_at(tmp_path / "digits.mar")
    facts = Facts(tmp_path / "digits.mar", sha256, inspection.manifest.model_name, inspection.manifest.version, "", "", "")
    build = {"tool": "buildah", "base": base, "torch_index": ""}
    spec = DeploySpec.model_validate({"name": "digits", "target": "kubernetes", "model": facts.archive, "build": build})
    with this_machine(spec) as local:
        assert local.wheel is not None, "tests run from a checkout"
        made = recipe(spec, facts, local)
        image = f"{registry}/digits:{made.tag}"
        kind = PushedImage(Builder("buildah"), made)
        assert kind.observe(None, image) is None
        kind.create(None, Resource("Image", "Tsx::Registry::Image", image, {}))
    assert PushedImage(Builder("buildah"), made).observe(None, image) is not None  # the registry says so
    reported = json.loads(run("skopeo", "inspect", "--tls-verify=false", f"docker://{image}"))
    assert reported["Labels"]["tsx.model"] == f"{facts.model_name}/{facts.model_version}"
    layers = json.loads(run("skopeo", "inspect", "--tls-verify=false", "--raw", f"docker://{image}"))["layers"]
    sizes = ", ".join(f"{each['size'] / 1e6:.1f}" for each in layers)
    print(f"\n{image}: {reported['Digest']}; layers of {sizes} MB, packed")
    assert layers[-1]["size"] < 1e6  # the model comes last, so that another is all that has to be sent
    run("buildah", "rmi", "--force", image)
    serve(image, tmp_path, free_ports(3))


def serve(image: str, directory: Path, ports: list[int]) -> None:
    """What a runtime does: pull it, start its entry with its command as its user, ask for its health, and end it."""
    container = run("buildah", "from", "--pull-always", f"docker://{image}").strip()
    config = json.loads(run("buildah", "inspect", "--type", "image", image))["Docker"]["config"]
    assert config["User"] == str(UID)
    roles = zip(("INFERENCE", "MANAGEMENT", "METRICS"), ports, strict=True)
    environment = [f"--env=TSX_{role}_ADDRESS=http://127.0.0.1:{port}" for role, port in roles]
    inside = ["buildah", "run", *environment, container, "--"]
    with (directory / "log").open("w") as log:
        process = subprocess.Popen([*inside, *config["Entrypoint"], *config["Cmd"]], stdout=log, stderr=log)
    try:
        check = [*inside, *config["Healthcheck"]["Test"][1:]]
        deadline = time.monotonic() + DEADLINE * 2
        while subprocess.run(check, capture_output=True, check=False).returncode != 0:
            assert process.poll() is None, (directory / "log").read_text()
            assert time.monotonic() < deadline, (directory / "log").read_text()
            time.sleep(1)  # as a runtime's interval
        picture = (DIGITS / "images" / "7.png").read_bytes()
        url, kind = f"http://127.0.0.1:{ports[0]}/predictions/digits", {"Content-Type": "image/png"}
        with urlopen(Request(url, data=picture, headers=kind)) as answer:
            reported = json.loads(answer.read())
        print(f"7.png: {reported}")
        assert max(reported, key=reported.__getitem__) == "seven"
        assert run(*inside, "id", "-u").strip() == str(UID)
    finally:
        for server in psutil.Process(process.pid).children(recursive=True):  # buildah passes no signal on, as a runtime does
            if server.cmdline()[1:] == [*config["Entrypoint"][1:], *config["Cmd"]]:
                server.terminate()
        code = process.wait(DEADLINE)
    assert code == 0, (directory / "log").read_text()
