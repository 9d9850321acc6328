"""A handler that answers each request with its number, after the fault that the request names.

Examples of requests are `17`, `18 exit` and `19 flood 8`. This file is packed into an archive.
"""

import ctypes
import os
import random
import resource
import signal
import socket
import stat
import struct
import sys
import time
from pathlib import Path

from ts.handler_utils.utils import send_intermediate_predict_response

REPLY, PIECE = 6, 5  # kinds of frames in tsx_runtime.wire
HEADER = struct.Struct("<BBHIIQ")
LEAKS = []


def handle(data, context):
    if data is None:
        return None
    time.sleep(0.001)  # Meanwhile the next batch fills.
    return [act(idx, bytes(row["body"]).decode(), context) for idx, row in enumerate(data)]


def act(idx, text, context):
    number, *command = text.split()
    if command:
        return COMMANDS[command[0]](idx, context, *command[1:]) or number
    return number


def die(idx, context):
    os.kill(os.getpid(), signal.SIGKILL)


def freeze(idx, context):
    os.kill(os.getpid(), signal.SIGSTOP)


def leave(idx, context):
    os._exit(3)


def segfault(idx, context):
    ctypes.string_at(0)


def loop(idx, context):
    while True:
        pass


def fail(idx, context):
    raise ValueError("a poisonous request")


def wait(idx, context, path):
    Path(path + ".begun").touch()
    while not Path(path).exists():
        time.sleep(0.002)


def exhaust_memory(idx, context):
    """Make an allocation fail, by a limit on the memory of this process."""
    old_limits = resource.getrlimit(resource.RLIMIT_AS)
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + (32 << 20), old_limits[1]))
    try:
        bytearray(1 << 30)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, old_limits)


def leak_memory(idx, context, megabytes):
    LEAKS.append(b"x" * (int(megabytes) << 20))


def leak_files(idx, context, count):
    for _ in range(int(count)):
        LEAKS.append(open("/dev/null"))  # noqa: SIM115 - It stays open.


def flood(idx, context, megabytes):
    line = "flood " * 20 + "\n"
    for _ in range((int(megabytes) << 20) // len(line)):
        sys.stdout.write(line)
        sys.stderr.write(line)


def large(idx, context, megabytes):
    return "x" * (int(megabytes) << 20)


def stream(idx, context, pieces, kilobytes):
    for _ in range(int(pieces)):
        send_intermediate_predict_response(
            ["x" * (int(kilobytes) << 10)],
            {idx: context.get_request_id(idx)},
            "a piece",
            200,
            context,
        )


def channels():
    """Yield the file descriptors of this worker's sockets."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        try:
            if stat.S_ISSOCK(entry.stat().st_mode):
                yield int(entry.name)
        except OSError:
            pass  # This descriptor listed the directory and is closed.


def parts(idx, context, times):
    """Send the number in parts; with all parts the client must get the number."""
    for _ in range(int(times)):
        send_intermediate_predict_response(
            [""], {idx: context.get_request_id(idx)}, "a part", 200, context
        )


def note(idx, context, path, number):
    """Record that this request was run."""
    with open(path, "a") as file:
        file.write(f"{number}\n")


def pad(idx, context, text):
    """Do nothing; `text` only makes the request long."""


def close_channel(idx, context):
    for fd in list(channels()):
        os.close(fd)


def shut_channel(idx, context):
    """End the connection to the front end without ending the worker."""
    for fd in list(channels()):
        socket.socket(fileno=fd).shutdown(socket.SHUT_RDWR)
    time.sleep(600)


def half_frame(idx, context):
    send(HEADER.pack(REPLY, 1, 0, 1, 1, 1000) + b"x" * 100)
    os._exit(0)


def half_frame_and_on(idx, context):
    """Send half a frame, so that the next frame is read as its other half."""
    send(HEADER.pack(REPLY, 1, 0, 1, 1, 1000) + b"x" * 100)


def endless_frame(idx, context):
    """Announce a frame that is larger than any memory."""
    send(HEADER.pack(REPLY, 1, 0, 1, 1, 1 << 35) + b"x" * 100)


def stray_frame(idx, context):
    """Send a complete frame for a request that does not exist."""
    send(HEADER.pack(REPLY, 1, 0, 4_000_000_000, 0, 0))


def random_bytes(idx, context, seed):
    send(random.Random(int(seed)).randbytes(4096))


def random_frame(idx, context, seed):
    """Send a valid header with random content."""
    random_source = random.Random(int(seed))
    body = random_source.randbytes(random_source.randrange(1, 5000))
    send(
        HEADER.pack(
            random_source.choice((REPLY, PIECE)),
            1,
            0,
            random_source.randrange(100),
            random_source.randrange(len(body) // 12 + 1),
            len(body),
        )
        + body
    )


def send(frame):
    for fd in channels():
        try:
            os.write(fd, frame)
        except OSError:
            pass  # The socket is not the channel.


COMMANDS = {
    function.__name__: function
    for function in (
        *(die, freeze, leave, segfault, loop, fail, wait),
        *(exhaust_memory, leak_memory, leak_files, flood, large, stream, parts, note, pad),
        *(
            close_channel,
            shut_channel,
            half_frame,
            half_frame_and_on,
            endless_frame,
            stray_frame,
            random_bytes,
            random_frame,
        ),
    )
}
