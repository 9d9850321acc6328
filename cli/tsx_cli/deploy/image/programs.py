"""The programs docker, podman, buildah and kubectl; their errors are shortened to a sentence."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tsx_archiver.storage.private_directory import scratch_directory
from tsx_cli.common.failure import CliError
from tsx_cli.deploy.engine.kind import CloudError
from tsx_cli.deploy.image.recipe import Recipe

BUILDERS = ("docker", "podman", "buildah")
ENGINES = ("docker", "podman")
MAX_ERROR_LINES = 25  # lines of output that an error shows
_KUBECTL_LOG = re.compile(r"[EWIF]\d{4} \d\d:\d\d:\d\d")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
DIGEST_QUERIES = (  # programs that query a registry for the digest of a tag
    ("crane", ("digest",), ""),
    (
        "skopeo",
        ("--override-os", "linux", "inspect", "--no-tags", "--format", "{{.Digest}}"),
        "docker://",
    ),
    ("docker", ("buildx", "imagetools", "inspect", "--format", "{{.Manifest.Digest}}"), ""),
)
QUERY_TIMEOUT_S = 20.0
SKOPEO_ERROR = re.compile(r'level=\w+ msg="(.*)"')
PLATFORMS = {
    "x86_64": "linux/amd64",
    "amd64": "linux/amd64",
    "aarch64": "linux/arm64",
    "arm64": "linux/arm64",
}


class ProgramError(CloudError):
    """A program failed; `output` is its shortened output."""

    def __init__(self, message: str, output: str) -> None:
        super().__init__(message, "Program")
        self.output = output


@dataclass(frozen=True)
class Program:
    name: str
    base_arguments: tuple[str, ...] = ()  # arguments that precede those of each call

    def run(
        self,
        *arguments: str,
        doing: str,
        stdin: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> str:
        """Run the program, and return its output.

        Raises:
            ProgramError: The program failed, or cannot be started.
        """
        result = self.run_unchecked(*arguments, stdin=stdin, environment=environment)
        if result.returncode != 0:
            output = last_output(result)
            raise ProgramError(
                f"{doing}: {self.name} {arguments[0]} ended with {result.returncode}:"
                f" {output or 'it printed nothing'}{advice(output)}",
                output,
            )
        return result.stdout

    def run_unchecked(
        self,
        *arguments: str,
        stdin: str | None = None,
        environment: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(
                [self.name, *self.base_arguments, *arguments],
                input=stdin if stdin is not None else "",
                capture_output=True,
                text=True,
                errors="replace",
                env=None if environment is None else dict(environment),
                check=False,
                timeout=timeout,
            )
        except OSError as error:
            raise ProgramError(f"{self.name} cannot be started: {error.strerror}", "") from error
        except subprocess.TimeoutExpired as error:
            raise ProgramError(
                f"{self.name} had not ended after {error.timeout:g} s", ""
            ) from error

    def lines(self, *arguments: str) -> Generator[str, None, None]:
        """Yield the lines of stdout and stderr until the program ends or the iterator is closed.

        Raises:
            CloudError: The program failed.
        """
        process = subprocess.Popen(
            [self.name, *self.base_arguments, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                yield line.rstrip("\n")
            if (code := process.wait()) != 0:
                raise CloudError(
                    f"{self.name} {arguments[0] if arguments else ''} ended with {code}; its"
                    " output is above"
                )
        finally:
            process.terminate()
            process.stdout.close()
            process.wait()


def last_output(result: subprocess.CompletedProcess[str]) -> str:
    """Return the last lines of the output, without debug lines of kubectl."""
    return "\n".join(
        [line for line in _lines_of(result) if not _KUBECTL_LOG.match(line)][-MAX_ERROR_LINES:]
    )


def _lines_of(result: subprocess.CompletedProcess[str]) -> list[str]:
    return (result.stderr.strip() or result.stdout.strip()).splitlines()


def advice(output: str) -> str:
    if (
        "did you specify the right host or port" in output
        or "Unable to connect to the server" in output
    ):
        return (
            " `kubectl config get-contexts` lists the available clusters; --set"
            " kubernetes.context=NAME chooses another."
        )
    if "--mount option requires BuildKit" in output:
        return (
            " Install docker's buildx plugin (docker-buildx), or build with --set"
            " build.tool=buildah."
        )
    if (
        "no basic auth credentials" in output
        or "authentication required" in output
        or "unauthorized" in output.lower()
    ):
        return " Log in to the registry first."
    return ""


def working_program(choice: str, candidates: Sequence[str], alternative: str) -> Program:
    """Return the chosen program, or the first one that works.

    Raises:
        CliError: No program works; the message gives the reason for each.
    """
    output = []
    for name in candidates if choice == "auto" else (choice,):
        if shutil.which(name) is None:
            output.append(f"{name} is not installed")
            continue
        result = Program(name).run_unchecked(
            *(
                ("version", "--format", "{{.Server.Version}}")
                if name == "docker"
                else ("--version",)
            )
        )
        if result.returncode == 0:
            # podman may be installed under docker's name.
            is_podman = "podman" in Program(name).run_unchecked("--version").stdout
            return Program("podman" if is_podman else name)
        output.append(f"{name}: {(_lines_of(result) or ['it does not work'])[-1]}")
    raise CliError(f"no working container program was found: {'; '.join(output)}. {alternative}")


@dataclass(frozen=True)
class Builder:
    """A builder that builds and pushes images with a program of this machine."""

    choice: str = "auto"

    @cached_property
    def program(self) -> Program:
        return working_program(
            self.choice,
            BUILDERS,
            "Install one of them, give --image, or write the files with --emit dockerfile DIR and"
            " build elsewhere",
        )

    def build(self, recipe: Recipe, reference: str, machine: str | None) -> None:
        """Build an image.

        Args:
            recipe: The build files.
            reference: The name of the image.
            machine: The platform, such as linux/amd64; None for the platform of this machine.
        """
        with scratch_directory("tsx-build-") as directory:
            for name, text in recipe.files.items():
                (directory / name).write_text(text, "utf-8")
            for name, source in recipe.copied.items():
                shutil.copyfile(source, directory / name)
            arguments = ["build", "--target", recipe.stage, "--tag", reference]
            if self.program.name != "docker":
                arguments += ["--format", "docker"]  # The OCI format has no health checks.
            if machine is not None and machine != this_platform():
                arguments += ["--platform", machine]
            # Attestations would turn the image into a list of images, which Lambda rejects.
            environment = {**os.environ, "BUILDX_NO_DEFAULT_ATTESTATIONS": "1"}
            self.program.run(
                *arguments, str(directory), doing=f"building {reference}", environment=environment
            )

    def is_local(self, reference: str) -> bool:
        arguments = (
            ("inspect", "--type", "image", reference)
            if self.program.name == "buildah"
            else ("image", "inspect", reference)
        )
        return self.program.run_unchecked(*arguments).returncode == 0

    def is_pushed(self, reference: str) -> bool:
        """Tell whether the registry has the image.

        If no program here can find out, the answer is False: a second push does no harm.
        """
        if self.program.name == "docker":
            return self.program.run_unchecked("manifest", "inspect", reference).returncode == 0
        # podman and buildah find only lists of images in a registry, so skopeo is needed.
        if shutil.which("skopeo") is None:
            return False
        return (
            Program("skopeo").run_unchecked("inspect", "--raw", f"docker://{reference}").returncode
            == 0
        )

    def login(self, registry: str, user: str, password: str) -> None:
        arguments = ("login", "--username", user, "--password-stdin", registry)
        self.program.run(*arguments, doing=f"logging in to {registry}", stdin=password)

    def push(self, reference: str) -> str:
        """Push an image, and return its name with the digest if the program reports it."""
        with scratch_directory("tsx-push-") as directory:
            file = directory / "digest"
            arguments = () if self.program.name == "docker" else ("--digestfile", str(file))
            output = self.program.run("push", *arguments, reference, doing=f"pushing {reference}")
            return _with_digest(
                reference,
                file.read_text("utf-8") if file.is_file() else output.partition("digest: ")[2],
            )

    def pin_digest(self, reference: str) -> str:
        """Return a pushed image by its digest, from the registry or from this machine's push."""
        by_digest = pin_digest(reference)
        if by_digest != reference or self.program.name == "buildah":
            return by_digest
        result = self.program.run_unchecked(
            "image", "inspect", "--format", "{{json .RepoDigests}}", reference
        )
        pushed_name = re.search(
            rf'"({re.escape(_repository(reference))}@{DIGEST.pattern})"', result.stdout
        )
        return reference if pushed_name is None else pushed_name[1]

    def remove(self, reference: str) -> None:
        arguments = (
            ("rmi", reference) if self.program.name == "buildah" else ("image", "rm", reference)
        )
        self.program.run(*arguments, doing=f"removing {reference}")


def this_platform() -> str:
    machine = platform.machine().lower()
    return PLATFORMS.get(machine, machine)


def pin_digest(reference: str) -> str:
    """Return an image by its digest, because a tag may mean another image tomorrow.

    The name stays as it is if no program of this machine can find the digest.
    """
    return reference if "@" in reference else _with_digest(reference, digest_of(reference)[0])


def digest_of(reference: str) -> tuple[str, str]:
    """Return the digest of a tag in its registry, or the errors of the programs in its place."""
    reasons = []
    for name, arguments, scheme in DIGEST_QUERIES:
        if shutil.which(name) is None:
            continue
        try:
            result = Program(name).run_unchecked(
                *arguments, f"{scheme}{reference}", timeout=QUERY_TIMEOUT_S
            )
        except CloudError as error:
            reasons.append(error.message)
            continue
        if result.returncode == 0 and (match := DIGEST.search(result.stdout)):
            return match[0], ""
        if name == "docker" and Program(name).run_unchecked("buildx", "version").returncode != 0:
            continue
        line = (_lines_of(result) or ["it printed nothing"])[0]
        skopeo_error = SKOPEO_ERROR.search(line)
        text = (
            skopeo_error[1].replace('\\"', "'") if skopeo_error else line.removeprefix(f"{name}: ")
        )
        reasons.append(f"{name}: {text.rpartition(': ')[2]}")
    return "", "; ".join(reasons)


def _with_digest(reference: str, output: str) -> str:
    match = DIGEST.search(output)
    return reference if match is None else f"{_repository(reference)}@{match[0]}"


def _repository(reference: str) -> str:
    path, slash, last = reference.rpartition("/")
    return f"{path}{slash}{last.partition(':')[0]}"


def find_engine(choice: str) -> Program:
    return working_program(
        choice,
        ENGINES,
        "Install one of them, or write the files with --emit compose DIR and start them elsewhere",
    )
