"""The analysis of Python files: their models, code, data, settings and requirements."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
import yaml

from tsx_archiver import plan_archive
from tsx_archiver.packing import PackingPlan
from tsx_cli.archive.python_files.models import PythonModel, find_models, is_python_file
from tsx_cli.archive.python_files.spec import python_file_spec
from tsx_cli.common.failure import CliError

MODEL = "class M:\n    def predict(self, item):\n        return item\n"
LOADING = MODEL + "    def load(self):\n        {}\n"
BLOCK = "# /// script\n{}# ///\n"

Write = Callable[[Mapping[str, str]], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Return a function that writes files to the working directory."""
    monkeypatch.chdir(tmp_path)

    def write(files: Mapping[str, str]) -> None:
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return write


def plan(path: str = "app.py", extra_files: Sequence[str] = ()) -> PackingPlan:
    with python_file_spec(Path(path), extra_files=extra_files) as (spec, _):
        members = plan_archive(spec)
        contents = [
            member._replace(source=Path(member.source).read_bytes())  # type: ignore[arg-type]  # a path
            for member in members.members
        ]
        return members._replace(members=contents)


def names(path: str = "app.py", extra_files: Sequence[str] = ()) -> set[str]:
    return {member.name for member in plan(path, extra_files).members} - {path.rpartition("/")[2]}


def content(name: str) -> str:
    (source,) = (member.source for member in plan().members if member.name == name)
    assert isinstance(source, bytes)
    return source.decode()


LOCAL_MODULES = {
    "a module": ("import a", ["a.py"]),
    "a module in a function": (LOADING.format("from a import x"), ["a.py"]),
    "a module by its name": ("importlib.import_module('p.b')", ["p/__init__.py", "p/b.py"]),
    "a package": ("from p import b", ["p/__init__.py", "p/b.py"]),
    "a module of a package": ("import p.b", ["p/__init__.py", "p/b.py"]),
    "relative imports": ("import p.c", ["p/__init__.py", "p/b.py", "p/c.py", "p/s/d.py"]),
    "a package without __init__.py": ("from n.a import x\nimport n.m.b", ["n/a.py", "n/m/b.py"]),
    "all names": ("from star import *", ["star.py", "a.py"]),
    "modules that import each other": ("import one", ["one.py", "two.py"]),
    "the name of an installed module": ("import yaml", ["yaml.py"]),
    "an extension module": ("import fast", [f"fast{EXTENSION_SUFFIXES[0]}"]),
    "itself": ("import app", []),
    "a module that is linked": ("import linked", ["linked.py"]),
}


@pytest.mark.parametrize("case", LOCAL_MODULES)
def test_local_modules_are_packed(write: Write, case: str) -> None:
    code, expected = LOCAL_MODULES[case]
    unused = "broken.py", "p/unused.py", "logging.py"
    files = dict.fromkeys(unused, "def (") | {
        "a.py": "x = 1",
        "p/__init__.py": "",
        "p/b.py": "",
        "p/c.py": "from . import b\nfrom .s.d import e",
        "p/s/d.py": "from ..b import e",
        "n/a.py": "",
        "n/m/b.py": "",
        "star.py": "from a import *",
        "one.py": "import two",
        "two.py": "import one, app",
        "yaml.py": "",
        f"fast{EXTENSION_SUFFIXES[0]}": "\0",
        "elsewhere/real.py": "",
    }
    write({**files, "app.py": f"{code}\n{MODEL}"})
    Path("linked.py").symlink_to("elsewhere/real.py")
    assert names() == set(expected)


DATA = {
    "a file": ("open('words.txt')", ["words.txt"]),
    "a file in a directory": ("HERE / 'data' / 'a' / 'one.txt'", ["data/a/one.txt"]),
    "a joined path": ("os.path.join(HERE, 'data', 'two.txt')", ["data/two.txt"]),
    "a directory": ("HERE / 'data'", ["data/a/one.txt", "data/two.txt"]),
    "a directory of a name": ("HERE / 'data' / name", ["data/a/one.txt", "data/two.txt"]),
    "an argument": ("from_pretrained('data')", ["data/a/one.txt", "data/two.txt"]),
    "a file beside its module": ("import lib.m", ["lib/m.py", "lib/table.csv"]),
    "a name that is no path": ("return 'data', 'no such file', '', '/', 'x' * 5, '\\0'", []),
    "a long text": (f"return '{'x' * 5000}'", []),
    "the folder": ("HERE / '.', open('lib/.')", ["lib/m.py", "lib/table.csv"]),
    "hidden files": ("load_dotenv('.env'), open('../above.txt')", []),
    "files of an archive": ("open('requirements.txt'), open('MAR-INF/MANIFEST.json')", []),
}


@pytest.mark.parametrize("case", DATA)
def test_data_files_whose_paths_the_code_has_are_packed(write: Write, case: str) -> None:
    code, expected = DATA[case]
    data = "words.txt data/a/one.txt data/two.txt data/__pycache__/x.pyc lib/table.csv .env"
    files = dict.fromkeys([*data.split(), "requirements.txt", "MAR-INF/MANIFEST.json"], "x")
    write({**files, "lib/m.py": "open('table.csv'), Path('.')", "app.py": LOADING.format(code)})
    assert names() == set(expected)


def test_a_directory_has_no_hidden_files_and_no_links_out_of_it(
    write: Write, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = tmp_path_factory.mktemp("outside")
    (outside / "secret").write_text("x")
    files = dict.fromkeys(["data/a", "data/.env", "data/.git/config", "other/b"], "x")
    write({**files, "app.py": LOADING.format("HERE / 'data', HERE / 'linked'")})
    Path("data/directory").symlink_to(outside)
    Path("data/file").symlink_to(outside / "secret")
    Path("data/within").symlink_to("../other")
    Path("linked").symlink_to(outside)
    # A link that the code itself names is followed.
    assert names() == {"data/a", "data/within/b", "linked/secret"}


def test_extra_files_of_the_folder_keep_their_paths(write: Write) -> None:
    write({"x/app.py": MODEL, "x/plugins/a.py": "", "x/plugins/b/c.py": "", "other/d.txt": ""})
    expected = {"plugins/a.py", "plugins/b/c.py", "d.txt"}
    assert names("x/app.py", ["x/plugins", "other"]) == expected
    assert names("x/app.py", ["x/plugins/b/c.py"]) == {"plugins/b/c.py"}


MODELS = {
    "one request": (MODEL, [PythonModel("m", "M", False, False, {})]),
    "a batch": (
        "class TextModel:\n    def predict(self, batch): ...",
        [PythonModel("text_model", "TextModel", True, False, {})],
    ),
    "a batch by position": (
        "class HTTPModel:\n    def predict(this, batch, /): ...",
        [PythonModel("http_model", "HTTPModel", True, False, {})],
    ),
    "a static method": (
        "class M:\n    @staticmethod\n    def predict(batch): ...",
        [PythonModel("m", "M", True, False, {})],
    ),
    "a class method": (
        "class M:\n    @classmethod\n    def predict(cls, batch): ...",
        [PythonModel("m", "M", True, False, {})],
    ),
    "several parameters": (
        "async def predict(batch, top=3): ...",
        [PythonModel("app", "predict", False, True, {})],
    ),
    "a function, with settings of the module": (
        "batch_size = 4\ndef predict(batch): ...",
        [PythonModel("app", "predict", True, False, {"batchSize": 4})],
    ),
    "a parent in the file": (
        "class Base:\n    def predict(self, batch): ...\nclass Child(Base):\n    workers = 2",
        [PythonModel("child", "Child", True, False, {})],
    ),
    "two, and a private one": (
        "class A:\n    def predict(self, x): ...\nclass _B(A): ...\nclass C:\n"
        "    minWorkers: int = 2\n    def predict(self, x): ...",
        [PythonModel("c", "C", False, False, {"minWorkers": 2})],
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_models_are_found_without_running_the_file(write: Write, case: str) -> None:
    code, expected = MODELS[case]
    write({"app.py": f"raise SystemExit\n{code}"})
    assert find_models(Path("app.py")) == expected


@pytest.mark.parametrize(
    "code", ["", "x = 1", "from base import M", "class M(Base): ...", "predict = Model()"]
)
def test_a_file_without_a_predict_function_of_its_own_has_no_models(
    write: Write, code: str
) -> None:
    write({"app.py": code})
    assert not is_python_file(Path("app.py"))


WRONG = {
    "an unknown name": ("app.py:N", MODEL, "it has M"),
    "an inherited method": ("app.py:M", "class M(Base): ...", "that is written there"),
    "a wrong setting": ("app.py", MODEL + "    batch_size = 'x'", "valid integer"),
    "a computed setting": ("app.py", MODEL + "    batch_size = 4 * 2", "app.py, line 4"),
    "an unknown setting": (
        "app.py",
        BLOCK.format("# [tool.tsx]\n# batch_sise = 4\n") + MODEL,
        "did you mean batchSize",
    ),
    "settings without keys": (
        "app.py",
        BLOCK.format("# [tool]\n# tsx = 4\n") + MODEL,
        "must have keys",
    ),
    "invalid TOML": ("app.py", BLOCK.format("# [tool\n") + MODEL, "is not TOML"),
    "requirements as a text": (
        "app.py",
        BLOCK.format("# dependencies = 'torch'\n") + MODEL,
        "must be a list",
    ),
    **{
        f"the requirement {line!r}": (
            "app.py",
            BLOCK.format(f"# dependencies = [{line}]\n") + MODEL,
            "is not the requirement of a package",
        )
        for line in (
            "'--index-url https://example.com'",
            "'-r /etc/passwd'",
            "'numpy', '-e .'",
            "'/etc/passwd'",
            "'https://example.com/a.whl'",
            '"numpy\\n--pre"',
            "'numpy --global-option=a'",
        )
    },
    "two blocks": ("app.py", (BLOCK.format("# x = 1\n") + "\n") * 2 + MODEL, "has 2 blocks"),
    "a broken file": ("app.py", "def (", "app.py is not valid Python, line 1"),
    "a deep expression": ("app.py", "x = " + "+".join("1" * 100_000), "nested too deeply"),
    "a circle of classes": ("app.py", "class A(B): ...\nclass B(A): ...", "no class with"),
    "a broken module": ("app.py", "import broken\n" + MODEL, "broken.py is not valid Python"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_file_that_cannot_be_packed_has_an_error_that_says_why(write: Write, case: str) -> None:
    path, code, reason = WRONG[case]
    write({"app.py": code, "broken.py": "def ("})
    with pytest.raises(CliError, match=reason):
        plan(path)


@pytest.mark.parametrize(
    "encoded",
    [
        lambda text: text.replace("\n", "\r\n").encode(),
        lambda text: b"\xef\xbb\xbf" + text.encode(),
        lambda text: b"# -*- coding: latin-1 -*-\n# \xe9\n" + text.encode(),
    ],
    ids=["CRLF", "BOM", "latin-1"],
)
def test_the_encoding_of_a_file_does_not_hide_its_block(
    write: Write, encoded: Callable[[str], bytes]
) -> None:
    write({"a.py": ""})
    block = BLOCK.format('# dependencies = ["six"]\n# [tool.tsx]\n# batch_size = 3\n')
    Path("app.py").write_bytes(encoded(f"{block}import a\n{MODEL}"))
    assert names() == {"a.py", "requirements.txt", "model-config.yaml"}
    assert content("requirements.txt") == "six\n"
    assert yaml.safe_load(content("model-config.yaml")) == {"batchSize": 3}


def test_settings_of_a_class_precede_those_of_the_block_and_of_the_config_file(
    write: Write,
) -> None:
    block = BLOCK.format("# [tool.tsx]\n# batchSize = 2\n# maxBatchDelay = 2\n")
    write(
        {
            "app.py": f"{block}{MODEL}    batch_size = 1",
            "model-config.yaml": "batchSize: 3\nmaxBatchDelay: 3\nminWorkers: 3",
        }
    )
    config = yaml.safe_load(content("model-config.yaml"))
    assert config == {"batchSize": 1, "maxBatchDelay": 2, "minWorkers": 3}


def test_requirements_of_the_environment_are_those_that_tsx_does_not_need(write: Write) -> None:
    write({"app.py": f"import json, torch, pytest, no_such_library\n{MODEL}"})
    assert [line.partition("==")[0] for line in content("requirements.txt").split()] == ["pytest"]


def test_the_manifest_names_the_class_of_each_model(write: Write) -> None:
    write({"my app.py": "async def predict(item): ..."})
    manifest = plan("my app.py").manifest
    assert manifest["model"]["modelName"] == "my_app"
    expected = '{"file": "my app.py", "name": "predict", "is_batched": false, "is_async": true}'
    assert json.dumps(manifest["pythonFile"]) == expected
