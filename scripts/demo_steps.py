"""The steps of scripts/demo, with the real commands: archive, serve, ask, stop.

If a step fails, the program prints the reason and exits with 1.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import psutil
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
DIGITS = ROOT / "examples" / "digits"
DEMO_DIRECTORY = ROOT / ".demo"
TSX = Path(sys.executable).with_name("tsx")
DIGIT, EXPECTED_LABEL = 7, "seven"
START_SECONDS = 120
STOP_SECONDS = 30


class DemoFailed(Exception):
    """A step of the demo failed; the text is for the user."""


def step(number: int, title: str, *command: object) -> None:
    arguments = [
        os.path.relpath(text, ROOT) if text.startswith(str(ROOT)) else text
        for text in map(str, command)
    ]
    print(f"\n{number}. {title}\n   $ {shlex.join(arguments)}", flush=True)


def say(text: str) -> None:
    print("\n".join(f"   {line}" for line in text.splitlines()), flush=True)


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]


def settings_of_the_demo() -> dict[str, str]:
    """Return the commands' environment: free ports, files in .demo/, and no other settings."""
    inference, management, metrics = free_ports(3)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TSX_")}
    return environment | {
        "TSX_INFERENCE_ADDRESS": f"http://127.0.0.1:{inference}",
        "TSX_MANAGEMENT_ADDRESS": f"http://127.0.0.1:{management}",
        "TSX_METRICS_ADDRESS": f"http://127.0.0.1:{metrics}",
        "TSX_CACHE_DIR": str(DEMO_DIRECTORY / "cache"),
    }


def archive(environment: dict[str, str]) -> Path:
    archive_path = DEMO_DIRECTORY / "digits.mar"
    archive_path.unlink(missing_ok=True)
    command = [
        "archive",
        DIGITS / "digits.pth",
        "--model-file",
        DIGITS / "model.py",
        "--handler",
        DIGITS / "handler.py",
    ]
    command += ["--config-file", DIGITS / "model-config.yaml"]
    step(
        1,
        "Pack the trained weights, the network, the handler and the names of the classes into one"
        " file",
        "tsx",
        *command,
    )
    process = subprocess.run(
        [TSX, *command],
        cwd=DEMO_DIRECTORY,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    say(process.stdout + process.stderr)
    if process.returncode != 0 or not archive_path.is_file():
        raise DemoFailed(
            f"tsx archive ended with exit code {process.returncode} and made"
            f" {'a' if archive_path.is_file() else 'no'} digits.mar"
        )
    return archive_path


def serve(
    archive_path: Path, environment: dict[str, str], stack: ExitStack
) -> subprocess.Popen[bytes]:
    """Start a server, which ends with `stack`, and return it once it is healthy."""
    step(2, "Serve it", "tsx", "serve", archive_path)
    log = DEMO_DIRECTORY / "server.log"
    started = time.monotonic()
    output = stack.enter_context(log.open("wb"))
    server = subprocess.Popen(
        [TSX, "serve", archive_path],
        cwd=DEMO_DIRECTORY,
        env=environment,
        stdout=output,
        stderr=subprocess.STDOUT,
    )
    stack.callback(lambda: server.poll() is None and server.kill())
    while not healthy(environment["TSX_INFERENCE_ADDRESS"]):
        if server.poll() is not None:
            raise DemoFailed(
                f"the server ended with exit code {server.returncode}; its"
                f" output:\n{log.read_text(errors='replace')}"
            )
        if time.monotonic() > started + START_SECONDS:
            raise DemoFailed(
                f"the server was not ready after {START_SECONDS} s; its"
                f" output:\n{log.read_text(errors='replace')}"
            )
        time.sleep(0.05)
    say(
        f"Ready after {time.monotonic() - started:.1f} s at {environment['TSX_INFERENCE_ADDRESS']};"
        " what it prints is in .demo/server.log"
    )
    return server


def healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/ping", timeout=5) as answer:
            return bool(json.load(answer)["status"] == "Healthy")
    except (OSError, ValueError, KeyError):  # The server does not listen yet, or is still loading.
        return False


def draw_image(image: Path) -> str:
    """Draw an image with two characters for each pixel."""
    with Image.open(image) as picture:
        grey_image = picture.convert("L")
        return "\n".join(
            "".join(
                " .:-=+*#%@"[int(grey_image.getpixel((x, y))) * 9 // 255] * 2
                for x in range(grey_image.width)
            ).rstrip()
            for y in range(grey_image.height)
        )


def ask(environment: dict[str, str], digit: int) -> dict[str, float]:
    url = f"{environment['TSX_INFERENCE_ADDRESS']}/predictions/digits"
    request = urllib.request.Request(
        url,
        data=(DIGITS / "images" / f"{digit}.png").read_bytes(),
        headers={"Content-Type": "image/png"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            labels: dict[str, float] = json.load(answer)
            return labels
    except urllib.error.HTTPError as error:
        raise DemoFailed(
            f"the server answered {error.code}: {error.read().decode(errors='replace')}"
        ) from error


def ask_one(environment: dict[str, str]) -> None:
    image = DIGITS / "images" / f"{DIGIT}.png"
    step(
        3,
        "Send it a picture that it has never seen",
        "curl",
        environment["TSX_INFERENCE_ADDRESS"] + "/predictions/digits",
        "-T",
        image,
    )
    say(draw_image(image))
    labels = ask(environment, DIGIT)
    for label, probability in labels.items():
        say(f"{label:>6} {probability:7.2%}")
    answer = max(labels, key=labels.__getitem__)
    if answer != EXPECTED_LABEL:
        raise DemoFailed(
            f"the picture shows a {EXPECTED_LABEL}, and the answer is {answer}: {labels}"
        )
    say(f"It is a {answer}: right.")


def stop(server: subprocess.Popen[bytes]) -> None:
    step(4, "Stop it", "kill", server.pid)
    workers = psutil.Process(server.pid).children(recursive=True)
    server.send_signal(signal.SIGTERM)
    try:
        code = server.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        raise DemoFailed(
            f"the server was still there {STOP_SECONDS} s after it was asked to stop"
        ) from None
    if code != 0:
        raise DemoFailed(
            f"the server stopped with exit code {code}; its output is in .demo/server.log"
        )
    _, remaining_workers = psutil.wait_procs(workers, timeout=STOP_SECONDS)
    if remaining_workers:
        raise DemoFailed(
            f"the server left processes behind: {', '.join(map(str, remaining_workers))}"
        )
    say(f"It ended its {len(workers)} processes and exited with code 0.")


def main() -> int:
    environment = settings_of_the_demo()
    try:
        with ExitStack() as stack:
            server = serve(archive(environment), environment, stack)
            ask_one(environment)
            stop(server)
    except DemoFailed as failed:
        print(f"\nThe demo failed: {failed}", file=sys.stderr)
        return 1
    print("\nThat is all: from a file to an answer. The README goes on from here.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
