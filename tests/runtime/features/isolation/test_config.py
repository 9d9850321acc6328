"""Isolated workers, tested with archives that attack the server and with ordinary ones."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.kit.jobs import a_waiting_job, answer_of
from tests.support.clients.talker import a_registry, ask, gone, order, submit, until
from tests.support.models import make_model
from tests.support.servers import FREE_PORTS, serving
from tsx_archiver import ArchiveSpec, write_archive
from tsx_runtime import wire
from tsx_runtime.api.management.describe import describe_version
from tsx_runtime.core.registry.standalone import open_model
from tsx_runtime.errors import BadRequest, LoadFailed, SettingError
from tsx_runtime.features.isolation import config
from tsx_runtime.features.isolation.config import Isolation, isolation_of, missing_features
from tsx_runtime.features.ui import state
from tsx_runtime.settings.schema import ModelSettings, Settings
from tsx_runtime.settings.sources import load_settings

MISSING_FEATURES = "; ".join(missing_features(Isolation()))
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(
        bool(MISSING_FEATURES), reason=f"this system cannot isolate: {MISSING_FEATURES}"
    ),
    pytest.mark.slow,
]

# The handler evaluates the body of a request and returns the result or the error.
HANDLER = """
import ctypes, os, resource, signal, socket, subprocess, sys, tempfile, time
libc = ctypes.CDLL(None, use_errno=True)

def call(number, *arguments):
    if libc.syscall(ctypes.c_long(number), *arguments) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return 0

def c(name, *arguments):
    result = getattr(libc, name)(*arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result

def attempt(code):
    try:
        return str(eval(code))
    except Exception as error:
        return f"{type(error).__name__}: {error}"

def handle(data, context):
    if data is None:
        return None
    return [attempt((row.get("data") or row["body"]).decode()) for row in data]
"""

# Attacks that succeed in a worker that is not isolated. The fixture `targets` fills in the names.
ATTACKS = {
    "reads a file beside the store": "open('{secret}').read()",
    "reads another model's archive": "open('{store}/other.mar', 'rb').read(2)",
    "lists the model store": "os.listdir('{store}')",
    "appends to a file elsewhere": "open('{victim}', 'a').write('x')",
    "truncates a file elsewhere": "os.truncate('{victim}', 0)",
    "renames a file elsewhere": "os.rename('{victim}', '{victim}')",
    "links to a file elsewhere": "os.link('{victim}', '{victim}.link')",
    "makes a directory elsewhere": "os.makedirs('{victim}.d', exist_ok=True)",
    "removes a file elsewhere": "os.remove('{victim}.remove')",
    "changes a file's mode": "os.chmod('{victim}', 0o666)",
    "changes a file's mode by a descriptor": "os.fchmod(os.open('handler.py', os.O_RDONLY), 0o644)",
    "changes a file's owner": "os.chown('{victim}', os.getuid(), os.getgid())",
    "changes a file's time": "os.utime('{victim}')",
    "writes to its model's directory": "open('new', 'w').write('x')",
    "writes to the temporary directory": "open('{tmp}/tsx-test-isolation', 'w').write('x')",
    "writes to shared memory": "open('/dev/shm/tsx-test-isolation', 'w').write('x')",
    "connects by TCP": "socket.create_connection(('127.0.0.1', {port}))",
    "sends by UDP": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))",
    "listens": "socket.create_server(('127.0.0.1', 0))",
    "connects to a unix socket": "socket.socket(socket.AF_UNIX).connect('{unix}')",
    "sends to a unix socket": "socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'x', '{unix}.dgram')",
    "sends to a unix socket from a pair": "socket.socketpair(type=socket.SOCK_DGRAM)[0].sendto(b'x', '{unix}.dgram')",
    "connects to an abstract socket": "socket.socket(socket.AF_UNIX).connect('{abstract}')",
    "reads the front end's environment": "open('/proc/{front}/environ').read()",
    "reads the front end's memory": "open('/proc/{front}/mem', 'rb') and open('/proc/{front}/maps').read()",
    "reads what the front end has open": "os.readlink('/proc/{front}/fd/0')",
    "signals the front end": "os.kill({front}, 0)",
    "signals another process": "os.kill({neighbour}, signal.SIGCONT)",
    "signals a process by a descriptor": "signal.pidfd_send_signal(os.pidfd_open({neighbour}), signal.SIGCONT)",
    "signals whom SIGIO goes to": "__import__('fcntl').fcntl(socket.socketpair()[0], 8, {neighbour})",
    "traces another process": "c('ptrace', 0x4206, {neighbour}, None, None)",
    "limits another process": "resource.prlimit({neighbour}, resource.RLIMIT_CORE, (0, 0))",
    "pins another process": "os.sched_setaffinity({neighbour}, os.sched_getaffinity({neighbour}))",
    "slows another process down": "os.setpriority(os.PRIO_PROCESS, {neighbour}, 1)",
    "leaves its process group": "subprocess.run(['true'], start_new_session=True)",
    "makes shared memory of System V": "c('shmget', 0x7e57, 1, 0o1600)",
    "finds a secret in its environment": "os.environ['TSX_TEST_PRIVATE']",
    "finds the server's home": "os.listdir('{home}')",
}
# Attacks that need root, or that would do harm without isolation.
ONLY_ISOLATED = {
    "mounts": "c('mount', b'none', b'.', b'tmpfs', 0, None)",
    "makes namespaces": "call({unshare}, 0x10000000)",
    "makes a raw socket": "socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)",
    "makes a packet socket": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "makes an io_uring": "call(425, 1, None)",
    "loads BPF": "call({bpf}, 0, None, 0)",
    "handles page faults": "call({userfaultfd}, 0)",
    "reads the password hashes": "open('/etc/shadow').read()",
    "changes a mode by the newest call": "call(452, -100, b'{victim}', 0o666, 0)",
    "outlives its parent": "c('prctl', 1, 0, 0, 0, 0)",
    "types into the terminal": "c('ioctl', 1, 0x5412, b'x')",
    "becomes another user": "os.setuid(12345)",
}
NUMBERS = (
    {"unshare": 272, "bpf": 321, "userfaultfd": 323}
    if os.uname().machine == "x86_64"
    else {"unshare": 97, "bpf": 280, "userfaultfd": 282}
)
REFUSAL = re.compile("PermissionError|KeyError: 'TSX_TEST_PRIVATE'")


@pytest.fixture(scope="module")
def targets(tmp_path_factory) -> Iterator[dict[str, object]]:
    """Make the targets of the attacks: files, sockets, and processes of the same user."""
    directory = tmp_path_factory.mktemp("attacked")
    store = directory / "store"
    store.mkdir()
    make_model(store / "other.mar", HANDLER)
    (directory / "secret").write_text("the key")
    for name in ("victim", "victim.remove"):
        (directory / name).write_text("whole")
    other_process = subprocess.Popen(["sleep", "600"])
    abstract = f"\0tsx-test-{os.getpid()}"
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as unix,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams,
        socket.socket(socket.AF_UNIX) as abstract_socket,
    ):
        unix.bind(str(directory / "unix"))
        datagrams.bind(str(directory / "unix.dgram"))
        abstract_socket.bind(abstract)
        unix.listen()
        abstract_socket.listen()
        yield {
            "store": store,
            "secret": directory / "secret",
            "victim": directory / "victim",
            "tmp": directory,
            "home": Path.home(),
            "unix": directory / "unix",
            "abstract": "\\0" + abstract[1:],
            "port": tcp.getsockname()[1],
            "front": os.getpid(),
            "neighbour": other_process.pid,
            **NUMBERS,
        }
    other_process.kill()
    other_process.wait()
    Path("/dev/shm/tsx-test-isolation").unlink(missing_ok=True)
    subprocess.run(["ipcrm", "-M", "0x7e57"], capture_output=True, check=False)


def collect_answers(
    directory: Path, questions: Mapping[str, str], **settings: object
) -> dict[str, str]:
    path = make_model(directory / "hostile.mar", HANDLER)

    async def ask_each() -> dict[str, str]:
        cache = directory / "cache"
        async with a_registry(worker_preload=False, cache_dir=cache, **settings) as registry:
            version = await registry.register_path(path, order())
            return {name: await ask(version, text) for name, text in questions.items()}

    patch = pytest.MonkeyPatch()
    patch.setenv("TSX_TEST_PRIVATE", "the key")
    with patch.context():
        answers = asyncio.run(ask_each())
    patch.undo()
    return answers


@pytest.fixture(scope="module")
def isolated_answers(targets, tmp_path_factory) -> dict[str, str]:
    questions = {
        name: code.format(**targets) for name, code in {**ATTACKS, **ONLY_ISOLATED}.items()
    }
    return collect_answers(tmp_path_factory.mktemp("isolated"), questions, isolation="on")


@pytest.mark.parametrize("attack", [*ATTACKS, *ONLY_ISOLATED])
def test_isolation_stops_the_attack(attack, isolated_answers, targets):
    assert REFUSAL.search(isolated_answers[attack]), isolated_answers[attack]
    assert targets["victim"].read_text() == "whole"


@pytest.fixture(scope="module")
def unisolated_answers(targets, isolated_answers, tmp_path_factory) -> dict[str, str]:
    """Run the attacks without isolation; they succeed there."""
    questions = {name: code.format(**targets) for name, code in ATTACKS.items()}
    return collect_answers(tmp_path_factory.mktemp("free"), questions)


# A forked worker has the environment in which this process started its first server.
@pytest.mark.parametrize(
    "attack", [name for name in ATTACKS if name != "finds a secret in its environment"]
)
def test_without_isolation_the_attack_succeeds(attack, unisolated_answers):
    assert "Error" not in unisolated_answers[attack], unisolated_answers[attack]


# Landlock ABI 1 cannot deny all of these; therefore a system-call filter must.
OLD_KERNEL = """
import json, os, sys
sys.path.append(sys.argv[1])
from tsx_runtime.features.isolation.sandbox import enter, landlock
landlock.abi = lambda: 1
enter.enter(json.loads(sys.argv[2]))
"""


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    "attack",
    [
        "os.kill({neighbour}, 18)",
        "os.truncate('handler.py', 0)",
        "os.open('handler.py', os.O_RDONLY | os.O_TRUNC)",
    ],
)
def test_isolation_on_an_older_kernel_stops_the_attack(attack, targets, tmp_path):
    (tmp_path / "handler.py").write_text("whole")
    (tmp_path / "scratch").mkdir()
    code = f"import os, sys; os.chdir(sys.argv[1]); print(open('handler.py').read(), flush=True); {attack.format(**targets)}"
    cell = {
        "command": [sys.executable, "-c", code, str(tmp_path)],
        "scratch": str(tmp_path / "scratch"),
        "read": [*config.SYSTEM_PATHS, *config.python_paths(), str(tmp_path)],
        "devices": config.DEVICES,
        "network": False,
        "group": None,
        "output": None,
        "label": "",
    }
    root = Path(config.__file__).parents[3]
    result = subprocess.run(
        [sys.executable, "-c", OLD_KERNEL, str(root), json.dumps(cell)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stdout == "whole\n", result.stderr
    assert "PermissionError: [Errno 1]" in result.stderr
    assert (tmp_path / "handler.py").read_text() == "whole"


def test_an_isolated_worker_has_no_privileges_and_only_its_sockets(ordinary_answers):
    status = ordinary_answers["status"]
    assert re.search(r"NoNewPrivs:\s1\n", status)
    assert re.search(r"Seccomp:\s2\n", status)
    assert re.search(r"CapEff:\s0+\n", status)
    assert re.search(r"CapBnd:\s0+\n", status) or os.getuid()
    open_descriptors = json.loads(ordinary_answers["descriptors"].replace("'", '"'))
    # The worker's own sockets, and those for its output.
    assert len([name for name in open_descriptors if name.startswith("socket:")]) <= 3
    assert not [name for name in open_descriptors if str(Path.cwd()) in name]


def test_an_isolated_worker_supports_ordinary_handlers(ordinary_answers):
    assert ordinary_answers["temporary"].startswith(ordinary_answers["home"])
    assert ordinary_answers["program"] == "written\n"
    assert ordinary_answers["pair"] == "b'x'"
    assert ordinary_answers["thread"] == "None"
    assert ordinary_answers["time"] == "True"


ORDINARY_CODE = {
    "status": "open('/proc/self/status').read()",
    "descriptors": "[os.readlink(f'/proc/self/fd/{n}') for n in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{n}')]",
    "home": "os.path.expanduser('~')",
    "temporary": "tempfile.NamedTemporaryFile().name",
    "program": "subprocess.run('cd; echo written > a; cp a b; cat b', shell=True, capture_output=True, text=True).stdout",
    "pair": "(lambda a, b: a.send(b'x') and b.recv(1))(*socket.socketpair())",
    "thread": "__import__('threading').Thread(target=int).start()",
    "time": "time.localtime().tm_year > 2000",
}


@pytest.fixture(scope="module")
def ordinary_answers(tmp_path_factory) -> dict[str, str]:
    return collect_answers(tmp_path_factory.mktemp("honest"), ORDINARY_CODE, isolation="on")


STREAMING = """
import sys
from ts.handler_utils.utils import send_intermediate_predict_response

def handle(data, context):
    if data is None:
        return None
    send_intermediate_predict_response(["one "], context.request_ids, "", 200, context)
    return [sys.prefix]
"""


def isolated_registry(directory: Path, **settings: Any):
    """Run a registry with isolated workers."""
    cache = directory / "cache"
    return a_registry(worker_preload=False, isolation="on", cache_dir=cache, **settings)


@pytest.mark.usefixtures("processes")
async def test_isolated_workers_with_their_own_environment_stream(tmp_path):
    async with isolated_registry(tmp_path) as registry:
        path = make_model(tmp_path / "m.mar", STREAMING, config="useVenv: true\n")
        version = await registry.register_path(path, order(initial_workers=2))
        answer = await answer_of(submit(version, ""))
        streamed = (await answer.read_all(1 << 20)).decode()
        assert streamed.startswith(f"one {tmp_path / 'cache'}")
        assert len({worker.pid for worker in version.workers}) == 2


@pytest.mark.usefixtures("processes")
def test_configured_paths_and_variables_are_allowed(targets, tmp_path):
    models = {
        "hostile": ModelSettings(
            isolation="on",
            isolation_network=True,
            isolation_paths=[targets["secret"]],
            isolation_variables=["TSX_TEST_PRIVATE"],
        )
    }
    questions = {
        "tcp": ATTACKS["connects by TCP"],
        "file": ATTACKS["reads a file beside the store"],
        "variable": ATTACKS["finds a secret in its environment"],
        "packets": ONLY_ISOLATED["makes a packet socket"],
        "store": ATTACKS["lists the model store"],
    }
    answers = collect_answers(
        tmp_path, {name: code.format(**targets) for name, code in questions.items()}, models=models
    )
    assert "raddr" in answers["tcp"]
    assert answers["file"] == answers["variable"] == "the key"
    assert "PermissionError" in answers["packets"]
    assert "PermissionError" in answers["store"]


@pytest.mark.usefixtures("processes")
async def test_an_isolated_worker_leaves_no_files_or_processes(tmp_path):
    async with isolated_registry(tmp_path) as registry:
        version = await registry.register_path(
            make_model(tmp_path / "hostile.mar", HANDLER, config="maxWorkerRequests: 3\n"), order()
        )
        scratch = Path(await ask(version, ORDINARY_CODE["home"]))
        child = int(await ask(version, "subprocess.Popen(['sleep', '600']).pid"))
        # This path exceeds the length limit of system calls, so it is hard to delete.
        deep = "[os.mkdir('d') or os.chdir('d') for _ in range(3000)]"
        await ask(
            version, f"os.chdir(os.environ['HOME']) or open('big', 'w').write('x') and {deep}"
        )
        assert (scratch / "big").exists()
        await until(lambda: version.stats.recycled["requests"])
        await until(lambda: gone(child))
        await until(lambda: not scratch.exists())
        assert Path(await ask(version, ORDINARY_CODE["home"])) != scratch


@pytest.mark.parametrize("part", ["create", "command", "environment"])
async def test_without_its_sandbox_an_isolated_worker_is_not_started(part, tmp_path, monkeypatch):
    path = make_model(tmp_path / "m.mar", HANDLER)
    monkeypatch.setattr(config.KernelSandbox, part, Mock(side_effect=OSError("no sandbox")))
    subprocesses, fork = Mock(), Mock()
    monkeypatch.setattr("tsx_runtime.core.workers.subprocesses.subprocess", subprocesses)
    monkeypatch.setattr("tsx_runtime.core.workers.forked.ProcessStarter._start", fork)
    async with isolated_registry(tmp_path) as registry:
        with pytest.raises(LoadFailed, match="no sandbox"):
            await registry.register_path(path, order())
    subprocesses.Popen.assert_not_called()
    fork.assert_not_called()


async def test_the_model_description_shows_the_isolation(tmp_path):
    async with a_registry(
        models={"m": ModelSettings(isolation="on")}, cache_dir=tmp_path / "cache"
    ) as registry:
        version = await registry.register_path(
            make_model(tmp_path / "m.mar", HANDLER), order(initial_workers=0)
        )
        description = describe_version(version, {}, {}).isolation
        assert description == Isolation().describe()
        assert description["network"] is False
        assert state.describe_version(version, {})["isolation"] == description
        unisolated_version = await registry.register_path(
            make_model(tmp_path / "n.mar", HANDLER), order(initial_workers=0)
        )
        assert describe_version(unisolated_version, {}, {}).isolation is None


def test_settings_of_a_model_override_the_global_isolation():
    models = {
        "free": ModelSettings(isolation="off"),
        "online": ModelSettings(isolation_network=True, isolation_cpus=0.5),
    }
    settings = Settings(isolation="on", isolation_memory=512, isolation_processes=64, models=models)
    assert isolation_of(settings, "free") is None
    assert isolation_of(settings, "other") == Isolation(memory=512, processes=64)
    assert isolation_of(settings, "online") == Isolation(
        network=True, memory=512, cpus=0.5, processes=64
    )


@pytest.mark.parametrize(
    ("sandbox_part", "text"),
    [("landlock.abi", "Landlock"), ("seccomp.library", "apt-get install libseccomp2")],
)
def test_a_server_that_cannot_isolate_refuses_to_start(sandbox_part, text, monkeypatch):
    monkeypatch.setattr(f"tsx_runtime.features.isolation.sandbox.{sandbox_part}", lambda: None)
    with pytest.raises(SettingError, match=text):
        config.check_isolation(Settings(models={"m": ModelSettings(isolation="on")}))
    config.check_isolation(Settings(models={"m": ModelSettings(isolation="off")}))


def test_a_limit_without_a_cgroup_is_refused_at_the_start(tmp_path):
    with pytest.raises(SettingError, match=r"isolation_memory: cgroups .*systemd-run"):
        config.check_isolation(
            Settings(isolation="on", isolation_memory=512, isolation_cgroup=tmp_path / "none")
        )


def test_isolation_is_set_by_a_file_or_on_the_command_line(tmp_path):
    (tmp_path / "tsx.toml").write_text(
        'isolation_memory = 900\n[models.m]\nisolation = "on"\nisolation_paths = ["/usr"]\n'
    )
    settings, _ = load_settings({"models.m.isolation_cpus": "1.5"}, {}, tmp_path / "tsx.toml")
    assert isolation_of(settings, "m") == Isolation(memory=900, cpus=1.5, paths=("/usr",))
    settings, _ = load_settings(
        {"models.m.isolation": "on", "models.m.isolation_paths": "/usr,/opt"},
        {"TSX_ISOLATION_PROCESSES": "9"},
    )
    assert isolation_of(settings, "m") == Isolation(processes=9, paths=("/usr", "/opt"))


def test_readable_paths_must_be_absolute_and_exist(tmp_path):
    with pytest.raises(SettingError, match=r"isolation_paths cannot be 'data' .*absolute"):
        load_settings({"isolation_paths": "data"}, {})
    settings, _ = load_settings(
        {"isolation": "on", "isolation_paths": f"{tmp_path},{tmp_path / 'none'}"}, {}
    )
    with pytest.raises(SettingError, match="none of isolation_paths does not exist"):
        config.check_isolation(settings)


async def test_models_that_cannot_run_isolated_are_refused(tmp_path):
    async with isolated_registry(tmp_path, install_py_dep_per_model=True) as registry:
        group = make_model(
            tmp_path / "group.mar", HANDLER, config="torchrun:\n  nproc-per-node: 2\n"
        )
        with pytest.raises(BadRequest, match="whose processes need the network"):
            await registry.register_path(group, order(initial_workers=0))
        needs_requirements = make_model(
            tmp_path / "needy.mar", HANDLER, requirementsFile="handler.py"
        )
        with pytest.raises(BadRequest, match="pip would run code"):
            await registry.register_path(needs_requirements, order(initial_workers=0))


DIGITS = Path(__file__).parents[4] / "examples" / "digits"


@pytest.mark.nightly
@pytest.mark.usefixtures("processes")
def test_a_real_model_gives_the_same_answers_with_isolation(tmp_path):
    spec = ArchiveSpec(
        "digits",
        str(DIGITS / "handler.py"),
        serialized_file=DIGITS / "digits.pt",
        extra_files=[DIGITS / "index_to_name.json"],
        config_file=DIGITS / "model-config.yaml",
    )
    archive = write_archive(spec, tmp_path)
    picture = (DIGITS / "images" / "7.png").read_bytes()

    async def predict(**settings: object) -> bytes:
        async with open_model(
            archive, Settings(cache_dir=tmp_path / "cache", worker_preload=False, **settings)
        ) as version:
            meta = wire.request_meta("id", b"", [(b"Content-Type", b"image/png")])
            version.submit(job := a_waiting_job(picture, meta=meta))
            return (await answer_of(job)).body

    isolated_answer, unisolated_answer = (
        asyncio.run(predict(isolation="on")),
        asyncio.run(predict()),
    )
    assert isolated_answer == unisolated_answer
    assert b"seven" in isolated_answer


@pytest.mark.nightly
@pytest.mark.usefixtures("processes")
def test_the_output_of_an_isolated_worker_is_in_the_log(tmp_path):
    make_model(tmp_path / "loud.mar", "print('as loud as ever')\n" + HANDLER)
    settings = ("isolation=on", f"log_location={tmp_path / 'logs'}")
    options = [argument for setting in settings for argument in ("--set", setting)]
    command = ["serve", tmp_path / "loud.mar", *FREE_PORTS, *options]
    with serving(command, tmp_path, {"TSX_CACHE_DIR": str(tmp_path / "cache")}) as server:
        assert server.stop() == 0
    assert "as loud as ever" in (tmp_path / "logs" / "model_log.log").read_text()
