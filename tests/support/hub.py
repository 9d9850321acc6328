"""A double of the Hugging Face Hub: the documented HTTP API for downloading models."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest


@dataclass
class HubRepo:
    """A model repository: its commits, branches and tags, and the token that may read it."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)  # the files of each commit
    refs: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    token: str | None = None
    # Wrong values in responses, by header or by JSON key.
    lies: dict[str, Any] = field(default_factory=dict)

    def commit(self, files: Path | dict[str, bytes], ref: str = "main") -> str:
        if isinstance(files, Path):
            files = {
                path.relative_to(files).as_posix(): path.read_bytes()
                for path in files.rglob("*")
                if path.is_file()
            }
        digest = hashlib.sha1(
            repr(sorted(files.items())).encode(), usedforsecurity=False
        ).hexdigest()
        self.commits[digest], self.refs[ref] = files, digest
        return digest


class Hub:
    def __init__(self) -> None:
        self.repos: dict[str, HubRepo] = {}
        self.requests: list[tuple[str, str, dict[str, str]]] = []  # method, path, headers
        # The number of bytes after which the next download of each file breaks off.
        self.break_off: dict[str, int] = {}
        self.go_on = threading.Event()  # downloads of files wait for this event
        self.go_on.set()
        self.asked = threading.Event()  # a download has begun
        self.url = ""

    def downloads(self) -> list[str]:
        return [
            path.partition("/resolve/")[2].partition("/")[2]
            for method, path, _ in self.requests
            if method == "GET" and "/resolve/" in path
        ]

    def environment(self, cache: Path) -> dict[str, str]:
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(cache),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
        }

    def use(self, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
        """Use the double in this process, where huggingface_hub may already be imported."""
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "ENDPOINT", self.url)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            self.url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        for name, value in self.environment(cache).items():
            monkeypatch.setenv(name, value)


@contextmanager
def hub_double() -> Iterator[Hub]:
    hub = Hub()

    class Handler(_Handler):
        double = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.go_on.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    double: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, *, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.double.requests.append(
            (self.command, path, {name.lower(): value for name, value in self.headers.items()})
        )
        api, segments = (
            path.startswith("/api/models/"),
            path.removeprefix("/api/models").strip("/").split("/"),
        )
        repo = self.double.repos.get("/".join(segments[:2]))
        if repo is None or (
            repo.token and self.headers.get("Authorization") != f"Bearer {repo.token}"
        ):
            return self._refuse(404 if repo is None else 401, "RepoNotFound")
        kind, revision, *file = segments[2:] if len(segments) > 3 else ("revision", "main")
        commit = repo.refs.get(revision, revision)
        files = repo.commits.get(repo.refs["main"] if "sha" in repo.lies else commit)
        if files is None:
            return self._refuse(404, "RevisionNotFound")
        if api and kind == "revision":
            siblings = [{"rfilename": name} for name in files]
            return self._json(
                {
                    "id": "/".join(segments[:2]),
                    "sha": repo.lies.get("sha", commit),
                    "siblings": siblings,
                }
            )
        if api:
            return self._json(
                [
                    {
                        "type": "file",
                        "path": name,
                        "size": len(content),
                        "oid": _oid(content),
                        **repo.lies.get("tree", {}),
                    }
                    for name, content in files.items()
                ],
                repo.lies.get("link"),
            )
        if "missing" in repo.lies:
            return self._refuse(404, "EntryNotFound", {"X-Repo-Commit": repo.lies["missing"]})
        if repo.gated:
            return self._refuse(403, "GatedRepo")
        content = files.get("/".join(file))
        return (
            self._refuse(404, "EntryNotFound")
            if content is None
            else self._file("/".join(file), content, commit, body, repo.lies)
        )

    def _file(
        self, name: str, content: bytes, commit: str, body: bool, lies: dict[str, Any]
    ) -> None:
        if body:
            self.double.asked.set()
            self.double.go_on.wait(60)
        begin = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if begin else 200)
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        etag, length = lies.get("etag", f'"{_oid(content)}"'), str(len(content) - begin)
        self._end({"X-Repo-Commit": commit, "ETag": etag, "Content-Length": length})
        if body:
            end = self.double.break_off.pop(name, len(content))
            self.wfile.write(content[begin:end])
            self.close_connection = end < len(content)

    def _json(self, value: Any, link: str | None = None) -> None:
        text = json.dumps(value).encode()
        self.send_response(200)
        headers = {"Link": f'<{link}>; rel="next"'} if link else {}
        self._end({"Content-Type": "application/json", "Content-Length": str(len(text)), **headers})
        self.wfile.write(text)

    def _refuse(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self._end(
            {
                "X-Error-Code": code,
                "X-Error-Message": code,
                "Content-Length": "0",
                **(headers or {}),
            }
        )

    def _end(self, headers: dict[str, str]) -> None:
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def _oid(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()
