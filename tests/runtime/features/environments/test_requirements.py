"""The requirements file of an archive, checked before pip reads it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.wheels import make_wheel
from tsx_runtime.features.environments.requirements import (
    NO_REQUIREMENTS,
    BadRequirements,
    read_requirements,
)


def read_file(directory: Path, text: str):
    (directory / "requirements.txt").write_text(text)
    return read_requirements(directory, "requirements.txt")


@pytest.mark.parametrize(
    "text",
    [
        "numpy>=1.2,<2 ; python_version < '3.12'\n\n# a comment\nfoo[bar]==1.0  # another",
        "torch==2.1.0+cpu\n--extra-index-url https://download.pytorch.org/whl/cpu",
        "foo==1.0 --hash=sha256:0a1b \\\n    --hash=sha256:2c3d",
        "foo @ https://example.com/foo-1.0-py3-none-any.whl",
        "git+https://github.com/a/b@v1#egg=b",
        "-i https://mirror.example.com/simple\n--pre\n--no-binary :all:\nfoo",
        "foo (>=1.0)",
    ],
)
def test_common_requirement_lines_are_accepted(tmp_path, text):
    assert read_file(tmp_path, text).inputs == (("requirements.txt", text),)


@pytest.mark.parametrize(
    "line",
    [
        "foo; $(touch here)",
        "foo `id`",
        "foo | sh",
        "foo && id",
        "foo > /etc/passwd",
        "foo\x1b[2J",
        "foo bar baz",
        "-e .",
        "--install-option=--prefix=/",
        "--global-option x",
        "--config-settings a=b",
        "--index-url file:///srv/packages",
        "--target /tmp/x",
        "foo --python /bin/sh",
        "file://elsewhere/share/foo.whl",
    ],
)
def test_an_invalid_requirement_is_refused_with_its_line_number(tmp_path, line):
    with pytest.raises(BadRequirements, match=r"^line 2 of requirements.txt, "):
        read_file(tmp_path, f"numpy\n{line}\n")


@pytest.mark.parametrize(
    "line",
    [
        "-r ../other.txt",
        "-c /etc/passwd",
        "--find-links ../..",
        "-f/etc",
        "../foo.whl",
        "/etc/foo.whl",
        "foo @ file:///etc/passwd",
        "link/foo.whl",
    ],
)
def test_paths_out_of_the_archive_are_refused(tmp_path, line):
    outside_directory = tmp_path / "outside"
    make_wheel(outside_directory, "foo", "1.0").rename(outside_directory / "foo.whl")
    (tmp_path / "other.txt").write_text("numpy\n")
    model = tmp_path / "model"
    model.mkdir()
    (model / "link").symlink_to(outside_directory)
    with pytest.raises(BadRequirements, match="is outside the archive"):
        read_file(model, line)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        # Parsing each of these lines once took seconds to years and blocked the server.
        (
            "a" + " " * 30_000 + "!",
            "not a requirement",
        ),
        ("a" + " " * 30_000 + "#" + " " * 30_000 + "b", None),
        ("a" + " \\\n" * 15_000 + "!", "not a requirement"),
        ("a;" + " --hash=a:0" * 2_500 + "!", "not a requirement"),
        ("a==1" + ",==1" * 8_000 + "?", "not a requirement"),
        ("a" * 40_000, "at most 32768 are read"),
    ],
    ids=["blanks", "comment", "continued", "hashes", "versions", "length"],
)
def test_every_line_is_parsed_quickly(tmp_path, line, text):
    start_s = time.thread_time()
    if text is None:
        read_file(tmp_path, line)
    else:
        with pytest.raises(BadRequirements, match=text):
            read_file(tmp_path, line)
    # A tenth of a second suffices; the limit leaves room for slow machines.
    assert time.thread_time() - start_s < 1


def test_a_requirement_may_have_a_hundred_hashes(tmp_path):
    text = "numpy==1.26.4; python_version < '3.13' \\\n    " + " \\\n    ".join(
        f"--hash=sha256:{number:064x}" for number in range(200)
    )
    assert read_file(tmp_path, text).inputs == (("requirements.txt", text),)


def test_a_requirements_file_that_links_out_of_the_archive_is_refused(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (tmp_path / "secret.txt").write_text("numpy\n")
    (model / "requirements.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(BadRequirements, match="is outside the archive"):
        read_requirements(model, "requirements.txt")


def test_installed_files_of_the_archive_are_inputs_of_the_environment(tmp_path):
    (tmp_path / "more.txt").write_text("six\n")
    package = tmp_path / "package"
    package.mkdir()
    (package / "setup.py").write_text("")
    requirements = read_file(tmp_path, "-r more.txt\n./package\n")
    assert [name for name, _ in requirements.inputs] == [
        "more.txt",
        "package/setup.py",
        "requirements.txt",
    ]
    (package / "setup.py").write_text("changed = True")
    assert read_file(tmp_path, "-r more.txt\n./package\n").inputs != requirements.inputs


def test_wheels_are_found_anywhere_in_the_archive(tmp_path):
    first, second = (
        make_wheel(tmp_path, "one", "1.0"),
        make_wheel(tmp_path / "wheels", "two", "1.0"),
    )
    requirements = read_file(tmp_path, "one\ntwo\n")
    assert requirements.wheel_directories == (first.parent, second.parent)
    assert {"one-1.0-py3-none-any.whl", "wheels/two-1.0-py3-none-any.whl"} < dict(
        requirements.inputs
    ).keys()


def test_an_error_in_an_included_file_names_that_file_and_line(tmp_path):
    (tmp_path / "more.txt").write_text("six\nfoo | sh\n")
    with pytest.raises(BadRequirements, match=r"^line 2 of more.txt, 'foo \| sh'"):
        read_file(tmp_path, "numpy\n-r more.txt\n")


def test_circular_includes_are_read_once(tmp_path):
    (tmp_path / "more.txt").write_text("-r requirements.txt\n")
    assert len(read_file(tmp_path, "-r more.txt\n").inputs) == 2


def test_without_a_requirements_file_nothing_is_installed(tmp_path):
    assert read_requirements(tmp_path, None) == NO_REQUIREMENTS


def test_a_package_file_is_also_checked_where_it_is_included(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "more.txt").write_text("/etc/passwd.whl\n")
    with pytest.raises(BadRequirements, match=r"line 1 of package/more\.txt"):
        read_file(tmp_path, "./package\n-r package/more.txt\n")


def test_files_of_a_package_are_not_mistaken_for_circular_includes(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    for number in range(40):
        (package / f"{number}.py").touch()
    (tmp_path / "more.txt").write_text("six\n")
    assert len(read_file(tmp_path, "./package\n-r more.txt\n").inputs) == 42
