"""The content of an archive's requirements file, checked before pip reads it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.wheels import make_wheel
from tsx_runtime.core.environments.requirements import (
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
def test_lines_that_pip_users_write_are_accepted(tmp_path, text):
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
def test_a_line_that_is_no_requirement_is_refused_with_its_number(tmp_path, line):
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
def test_no_path_leads_out_of_the_archive(tmp_path, line):
    outside = tmp_path / "outside"
    make_wheel(outside, "foo", "1.0").rename(outside / "foo.whl")
    (tmp_path / "other.txt").write_text("numpy\n")
    model = tmp_path / "model"
    model.mkdir()
    (model / "link").symlink_to(outside)
    with pytest.raises(BadRequirements, match="is outside the archive"):
        read_file(model, line)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        # Each line once took from seconds to years, in which the server answered nobody.
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
def test_no_line_takes_long_to_be_read(tmp_path, line, text):
    began = time.thread_time()
    if text is None:
        read_file(tmp_path, line)
    else:
        with pytest.raises(BadRequirements, match=text):
            read_file(tmp_path, line)
    # A tenth of a second is enough.
    assert time.thread_time() - began < 1


def test_a_requirement_may_have_a_hundred_hashes(tmp_path):
    text = "numpy==1.26.4; python_version < '3.13' \\\n    " + " \\\n    ".join(
        f"--hash=sha256:{number:064x}" for number in range(200)
    )
    assert read_file(tmp_path, text).inputs == (("requirements.txt", text),)


def test_the_file_itself_cannot_be_a_link_out_of_the_archive(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (tmp_path / "secret.txt").write_text("numpy\n")
    (model / "requirements.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(BadRequirements, match="is outside the archive"):
        read_requirements(model, "requirements.txt")


def test_files_of_the_archive_that_are_installed_are_inputs(tmp_path):
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


def test_wheels_of_the_archive_are_found_wherever_they_lie(tmp_path):
    first, second = (
        make_wheel(tmp_path, "one", "1.0"),
        make_wheel(tmp_path / "wheels", "two", "1.0"),
    )
    requirements = read_file(tmp_path, "one\ntwo\n")
    assert requirements.wheel_directories == (first.parent, second.parent)
    assert {"one-1.0-py3-none-any.whl", "wheels/two-1.0-py3-none-any.whl"} < dict(
        requirements.inputs
    ).keys()


def test_an_included_file_that_is_wrong_is_named_with_its_own_line(tmp_path):
    (tmp_path / "more.txt").write_text("six\nfoo | sh\n")
    with pytest.raises(BadRequirements, match=r"^line 2 of more.txt, 'foo \| sh'"):
        read_file(tmp_path, "numpy\n-r more.txt\n")


def test_files_that_include_each_other_come_to_an_end(tmp_path):
    (tmp_path / "more.txt").write_text("-r requirements.txt\n")
    assert len(read_file(tmp_path, "-r more.txt\n").inputs) == 2


def test_without_a_file_there_is_nothing_to_do(tmp_path):
    assert read_requirements(tmp_path, None) == NO_REQUIREMENTS


def test_a_file_that_is_part_of_a_package_is_checked_where_it_is_included_as_well(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "more.txt").write_text("/etc/passwd.whl\n")
    with pytest.raises(BadRequirements, match=r"line 1 of package/more\.txt"):
        read_file(tmp_path, "./package\n-r package/more.txt\n")


def test_the_files_of_a_package_do_not_count_as_files_that_include_each_other(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    for number in range(40):
        (package / f"{number}.py").touch()
    (tmp_path / "more.txt").write_text("six\n")
    assert len(read_file(tmp_path, "./package\n-r more.txt\n").inputs) == 42
