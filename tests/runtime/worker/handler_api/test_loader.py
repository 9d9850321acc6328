"""The search for handlers by name, and the errors if there is none."""

from __future__ import annotations

import pytest

from tests.runtime.worker.conftest import StartWorker

CLASS = """
    class Handler:
        def initialize(self, context):
            self.greeting = context.model_name
        def handle(self, data, context):
            return [self.greeting] * len(data)
"""
FUNCTION = """
    calls = []
    def handle(data, context):
        calls.append((data, context.model_name))
        return None if data is None else [str(calls[0])]
    def other(data, context):
        return None if data is None else ["other"]
"""


def test_a_function_named_handle_is_first_called_without_data(
    start_worker: StartWorker,
) -> None:
    assert start_worker(FUNCTION).ask(b"")[0].body == b"(None, 'm')"


@pytest.mark.parametrize(
    ("handler", "body"),
    [
        ("handler.py", b"(None, 'm')"),
        ("handler", b"(None, 'm')"),
        ("handler.py:other", b"other"),
        ("handler:other", b"other"),
        ("somewhere/else/handler.py:other", b"other"),
        (" handler.py ", b"(None, 'm')"),
    ],
)
def test_a_handler_may_be_named_in_several_ways(
    start_worker: StartWorker, handler: str, body: bytes
) -> None:
    assert start_worker(FUNCTION, handler=handler).ask(b"")[0].body == body


def test_a_handler_in_a_subdirectory_is_found_there_and_imports_its_neighbours(
    start_worker: StartWorker,
) -> None:
    files = {
        "src/service.py": "import near\ndef handle(data, context):\n    return None if data is None else [near.WHO]",
        "src/near.py": "WHO = 'neighbour'",
    }
    assert start_worker(files=files, handler="src/service.py").ask(b"")[0].body == b"neighbour"


def test_a_module_of_a_package_may_be_the_handler(start_worker: StartWorker) -> None:
    files = {
        "pack/__init__.py": "",
        "pack/serve.py": "def run(data, context):\n    return None if data is None else [__name__]",
    }
    assert start_worker(files=files, handler="pack.serve:run").ask(b"")[0].body == b"pack.serve"


def test_the_only_class_is_instantiated_and_initialized(start_worker: StartWorker) -> None:
    assert [answer.body for answer in start_worker(CLASS).ask(b"", b"")] == [b"m", b"m"]


def test_a_class_may_be_named(start_worker: StartWorker) -> None:
    assert (
        start_worker(CLASS + "\n    class Helper: pass\n", handler="handler.py:Handler")
        .ask(b"")[0]
        .body
        == b"m"
    )


def test_the_only_class_with_handle_and_initialize_is_the_handler(
    start_worker: StartWorker,
) -> None:
    helpers = (
        "\n    class Config: pass\n    class Part:\n        def handle(self, data, context): pass\n"
    )
    assert start_worker(CLASS + helpers).ask(b"")[0].body == b"m"


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("dali_image_classifier", "the DALI pipeline"),
        ("vllm_handler", "tsx serve DIRECTORY"),
        ("trt_llm_handler", "OpenAI routes"),
    ],
)
def test_the_error_for_an_unsupported_torchserve_handler_names_an_alternative(
    start_worker: StartWorker, name: str, instead: str
) -> None:
    worker = start_worker(handler=name)
    assert not worker.loaded
    assert f"tsx does not include TorchServe's {name}" in worker.report["message"]
    assert instead in worker.report["message"]


def test_imported_classes_are_ignored(start_worker: StartWorker) -> None:
    assert start_worker(
        "from collections import OrderedDict\nfrom pathlib import Path\n"
        + "\n".join(CLASS.split("\n    "))
    ).loaded


def test_if_the_named_function_is_missing_the_class_is_used(start_worker: StartWorker) -> None:
    assert start_worker(CLASS, handler="handler.py:handle_it").ask(b"")[0].body == b"m"


@pytest.mark.parametrize("name", ["json", "queue", "image_classifier", "model", "wire"])
def test_a_handler_may_have_the_name_of_an_installed_module(
    start_worker: StartWorker, name: str
) -> None:
    files = {
        f"{name}.py": "def handle(data, context):\n    return None if data is None else ['mine']"
    }
    assert start_worker(files=files, handler=f"{name}.py").ask(b"")[0].body == b"mine"


def test_async_handlers_run_on_one_loop(start_worker: StartWorker) -> None:
    worker = start_worker("""
        import asyncio
        class Handler:
            async def initialize(self, context):
                self.loop = asyncio.get_running_loop()
                self.lock = asyncio.Lock()
            async def handle(self, data, context):
                async with self.lock:
                    await asyncio.sleep(0)
                    return [asyncio.get_running_loop() is self.loop]
    """)
    assert worker.ask(b"")[0].body == worker.ask(b"")[0].body == b"true"


def test_an_async_function_is_awaited_at_load_and_for_requests(
    start_worker: StartWorker,
) -> None:
    worker = start_worker("""
        import asyncio
        async def handle(data, context):
            await asyncio.sleep(0)
            if data is None:
                context.ready = True
                return
            return [context.ready] * len(data)
    """)
    assert worker.ask(b"")[0].body == b"true"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import not_installed_here", "'not_installed_here'. Install that module"),
        ("from json import no_such_name", "cannot import name 'no_such_name'"),
        (
            "def handle(data, context)\n    pass",
            "line 1 is not valid Python: expected ':'",
        ),
        ("1 / 0", "does not import: ZeroDivisionError"),
        ("raise SystemExit('bye')", "does not import: SystemExit: bye"),
        ("x = 1", "has neither a function handle(data"),
        ("class A: pass\nclass B: pass", "defines 2 classes (A, B)"),
        ("class A: pass", "has no method handle"),
        (
            "class A:\n    def handle(self, data, context): pass",
            "has no method initialize",
        ),
        (
            "class A:\n    def __init__(self, x): pass\n    handle = initialize = lambda self, *args: None",
            "could not load the model: TypeError",
        ),
        (
            "def handle(data, context):\n    open('a/vocab.txt')",
            "'a/vocab.txt': add it with --extra-files",
        ),
        (
            "def handle(data, context):\n    open(context.system_properties['model_dir'] + '/vocab.txt')",
            "does not contain 'vocab.txt': add it",
        ),
        (
            "open('labels.json')",
            "No such file or directory: 'labels.json'. The archive does",
        ),
        (
            "def handle(data, context):\n    raise OSError('no disk')",
            "load the model: OSError: no disk",
        ),
        (
            "import ts.no_such_module",
            "TorchServe's module 'ts.no_such_module'",
        ),
    ],
)
def test_the_error_for_an_unusable_handler_names_the_problem(
    start_worker: StartWorker, source: str, message: str
) -> None:
    worker = start_worker(source)
    assert not worker.loaded
    assert message in worker.report["message"]
    assert worker.ended() == 0


FIRST_CALL = "The first call of a handler function"


@pytest.mark.parametrize(
    "body",
    [
        "return [row['body'] for row in data]",
        "return [1] * len(data)",
        "data[0]",
        "data.get('x')",
        "json.loads(data)",
    ],
)
@pytest.mark.parametrize("keyword", ["def", "async def"])
def test_the_error_explains_that_the_first_call_has_no_data(
    start_worker: StartWorker, keyword: str, body: str
) -> None:
    worker = start_worker(f"import json\n{keyword} handle(data, context):\n    {body}")
    assert FIRST_CALL in worker.report["message"]


@pytest.mark.parametrize(
    "source",
    [
        "def handle(data, context):\n    raise OSError('no disk')",
        "class A:\n    def initialize(self, context): len(None)\n    def handle(self, data, context): pass",
    ],
)
def test_other_errors_do_not_mention_the_first_call(start_worker: StartWorker, source: str) -> None:
    worker = start_worker(source)
    assert not worker.loaded
    assert "first call" not in worker.report["message"]


def test_the_traceback_has_only_the_handlers_code(start_worker: StartWorker) -> None:
    worker = start_worker(
        """
        import helper
        class Handler:
            def initialize(self, context):
                helper.prepare()
            def handle(self, data, context):
                return data
    """,
        files={"helper.py": "def prepare():\n    import missing_dependency\n"},
    )
    assert "No module named 'missing_dependency'" in worker.report["message"]
    traceback = worker.report["traceback"]
    assert traceback.startswith("Traceback (most recent call last):\n")
    assert "helper.prepare()" in traceback
    assert traceback.rstrip().endswith("ModuleNotFoundError: No module named 'missing_dependency'")
    assert "loader.py" not in traceback


def test_the_error_for_a_missing_handler_lists_the_existing_files(
    start_worker: StartWorker,
) -> None:
    message = start_worker(files={"other.py": ""}).report["message"]
    assert message.startswith("Handler 'handler.py' was not found: the archive has other.py, ")


def test_without_a_handler_the_base_handler_is_used(start_worker: StartWorker) -> None:
    assert "the archive names no serialized file" in start_worker(handler="").report["message"]


def test_the_error_names_a_missing_model_directory(start_worker: StartWorker) -> None:
    report = start_worker(FUNCTION, model_dir="/no/such/place").report
    assert "/no/such/place cannot be entered" in report["message"]


def test_handle_may_be_an_attribute_set_in_the_constructor(start_worker: StartWorker) -> None:
    worker = start_worker("""
        from ts.handler_utils.micro_batching import MicroBatching

        class Handler:
            def __init__(self):
                self.handle = MicroBatching(self, micro_batch_size=2)

            def initialize(self, context): ...

            def preprocess(self, data):
                return [bytes(row["body"]) for row in data]

            def inference(self, rows):
                return rows

            def postprocess(self, rows):
                return [b"%d %b" % (len(rows), row) for row in rows]
    """)
    assert worker.loaded, worker.report
    assert [answer.body for answer in worker.ask(b"a", b"b", b"c")] == [b"2 a", b"2 b", b"1 c"]


def test_a_missing_file_outside_the_archive_gives_no_advice_about_it(
    start_worker: StartWorker,
) -> None:
    worker = start_worker("open('/no/such/labels.json')")
    assert "--extra-files" not in worker.report["message"]
