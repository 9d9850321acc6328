"""The `torchserve` command: what it carries, and that it refuses the rest aloud."""

from __future__ import annotations

import pytest

from tsx_cli.torchserve import main

STARTED = ["--start", "--foreground", "--model-store", ".", "--ncs"]


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(list(words))
    return code, capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--version", "-v"])
def test_version_is_told_as_torchserve_tells_it(capsys: pytest.CaptureFixture[str], flag: str) -> None:
    assert main([flag]) == 0
    assert capsys.readouterr().out.startswith("TorchServe Version is 0.")


@pytest.mark.parametrize(
    "words",
    [
        ["--stop"],
        ["--start", "--ts-config", "x"],
        ["--start", "--workflow-store", "x"],
        ["--start", "--ppath", "x"],
        ["--start", "--log-config", "x"],
    ],
)
def test_what_is_not_carried_yet_is_refused(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    code, err = told(capsys, *words)
    assert code == 2
    assert "does not carry --" in err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "say what to do"),
        (["--start", "--model-store", "."], "add --foreground"),
        (["--start", "--foreground"], "Missing mandatory parameter --model-store"),
        (STARTED, "add --enable-model-api"),
        ([*STARTED, "--enable-model-api"], "or add --disable-token-auth"),
    ],
)
def test_what_is_missing_is_told(capsys: pytest.CaptureFixture[str], words: list[str], reason: str) -> None:
    code, err = told(capsys, *words)
    assert code == 2
    assert reason in err


def test_an_unknown_option_is_wrong_usage() -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--frobnicate"])
