"""Tokens that the server makes up: their file, their end, their renewal; and what is never told
(contract 1.5).
"""

from __future__ import annotations

import json
import logging
import stat
from datetime import datetime, timezone

import httpx
import pytest

from tsx_runtime.api.access.tokens import BearerToken, Keys, build_keys, made_up_tokens, start_keys
from tsx_runtime.errors import BadRequest, InvalidToken, SettingError, TsxError
from tsx_runtime.settings.schema import Settings

PATH = "/predictions/talker"


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def made_up(tmp_path, **values) -> Settings:
    return Settings.model_validate(
        {"generate_tokens": True, "key_file": tmp_path / "key_file.json"} | values
    )


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def test_the_file_is_torchserves_and_its_owners_alone(tmp_path):
    keys = start_keys(made_up(tmp_path))
    file = tmp_path / "key_file.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    reported = json.loads(file.read_text())
    assert list(reported) == ["management", "inference", "API"]
    assert reported["management"]["key"] == keys.management.token
    assert reported["API"] == {"key": keys.api.token}
    until = datetime.fromisoformat(reported["inference"]["expiration time"].replace("Z", "+00:00"))
    assert 3500 < (until - datetime.now(timezone.utc)).total_seconds() <= 3600
    assert len({keys.management.token, keys.inference.token, keys.api.token}) == 3
    keys.remove()
    assert not file.exists()


def test_a_file_that_is_there_is_replaced_with_its_mode(tmp_path):
    file = tmp_path / "key_file.json"
    file.write_text("{}")
    file.chmod(0o644)
    start_keys(made_up(tmp_path))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["key_file.json"]


def test_a_link_in_the_files_place_is_replaced_and_not_followed(tmp_path):
    (tmp_path / "victim").write_text("old")
    (tmp_path / "key_file.json").symlink_to(tmp_path / "victim")
    start_keys(made_up(tmp_path))
    assert (tmp_path / "victim").read_text() == "old"
    assert stat.S_IMODE((tmp_path / "key_file.json").lstat().st_mode) == 0o600


def test_where_another_user_could_replace_the_file_it_is_reported(tmp_path, caplog):
    start_keys(made_up(tmp_path))
    assert caplog.text == ""
    tmp_path.chmod(0o777)
    start_keys(made_up(tmp_path))
    assert "key_file: another user can replace" in caplog.text


def test_a_file_that_cannot_be_written_stops_the_start(tmp_path):
    with pytest.raises(SettingError, match="key_file"):
        start_keys(made_up(tmp_path, key_file=tmp_path / "nowhere" / "key_file.json"))


def test_tokens_that_were_made_up_stay_valid_in_the_server_that_replaces_this_one_and_end_as_they_would_have(
    tmp_path,
):
    clock = Clock()
    settings = made_up(tmp_path, token_expiration_min=1, management_token="mine")
    keys = build_keys(settings, clock)
    clock.now += 40
    handed = made_up_tokens(keys, settings)
    assert handed == {"inference": (keys.inference.token, 20), "api": (keys.api.token, None)}
    following = build_keys(settings, clock, handed)
    assert [key.token for key in following[:3]] == [key.token for key in keys[:3]]
    assert (
        following.inference.lifetime,
        following.inference.seconds_left,
        following.api.seconds_left,
    ) == (60, 20, None)


def test_a_token_ends_and_a_new_one_takes_its_place(tmp_path):
    clock = Clock()
    keys = build_keys(made_up(tmp_path, token_expiration_min=0.5), clock)
    key, header = keys.inference, b"Bearer " + keys.inference.token.encode()
    assert key.is_right(header)
    clock.now += 29
    assert key.is_right(header)
    clock.now += 1
    assert not key.is_right(header)
    changed = []
    key.on_change.append(lambda: changed.append(True))
    keys.renew("inference")
    assert changed
    assert not key.is_right(header)
    assert key.is_right(b"Bearer " + key.token.encode())
    assert key.token in (tmp_path / "key_file.json").read_text()
    clock.now += 3600
    assert keys.api.is_right(b"bearer " + keys.api.token.encode())  # this one does not end


def test_the_time_at_which_the_other_token_ends_is_written_as_it_was(tmp_path):
    keys = start_keys(made_up(tmp_path))
    first = json.loads((tmp_path / "key_file.json").read_text())
    keys.renew("inference")
    second = json.loads((tmp_path / "key_file.json").read_text())
    assert second["management"] == first["management"]
    assert second["inference"] != first["inference"]
    keys.renew("management")
    assert json.loads((tmp_path / "key_file.json").read_text())["inference"] == second["inference"]


def test_a_token_that_cannot_be_reported_takes_nobodys_place(tmp_path):
    (tmp_path / "place").mkdir()
    keys = start_keys(made_up(tmp_path, key_file=tmp_path / "place" / "key_file.json"))
    old = b"Bearer " + keys.inference.token.encode()
    keys.remove()
    (tmp_path / "place").rmdir()
    with pytest.raises(TsxError, match="The old one stays valid"):
        keys.renew("inference")
    assert keys.inference.is_right(old)


def test_tokens_of_the_users_own_are_kept_and_only_the_others_made_up(tmp_path):
    keys = build_keys(made_up(tmp_path, inference_token="mine"))
    assert keys.inference.token == "mine"
    assert keys.inference.seconds_left is None
    assert keys.management.seconds_left > 0
    with pytest.raises(BadRequest, match="cannot be changed while the server runs"):
        keys.renew("inference")
    own = build_keys(made_up(tmp_path, inference_token="a", management_token="b", api_token="c"))
    assert own.file is None


@pytest.mark.parametrize("kind", ["", "API", "api", "file", "nothing"])
def test_only_the_two_tokens_can_be_renewed(tmp_path, kind):
    with pytest.raises(InvalidToken, match="management or inference"):
        start_keys(made_up(tmp_path)).renew(kind)


def test_without_authorization_there_are_no_keys(tmp_path):
    assert build_keys(made_up(tmp_path, disable_token_authorization=True)) == Keys()


@pytest.mark.parametrize(
    "given", [b"", b"Bearer", b"Bearer ", b"Basic x", b"Bearer x y", b"Bearer \xff", b"Bearer X"]
)
def test_what_is_not_the_token_is_wrong(given):
    assert not BearerToken("x").is_right(given)


def test_a_renewed_token_holds_at_once_on_both_lanes_and_the_old_one_no_more(
    tmp_path, start_server
):
    with start_server(
        generate_tokens=True, key_file=tmp_path / "key_file.json", api_token="api"
    ) as server:
        server.register("talker.mar", initial_workers=1)

        def renew(kind: str) -> str:
            answer = server.management.get("/token", params={"type": kind}, headers=bearer("api"))
            assert (answer.status_code, answer.text) == (200, "\n")
            return json.loads((tmp_path / "key_file.json").read_text())[kind]["key"]

        first, manage = renew("inference"), renew("management")
        for _ in range(2):  # the second time the head is known
            assert server.inference.post(PATH, headers=bearer(first)).status_code == 200
        assert server.inference.get("/v1/models/talker", headers=bearer(first)).status_code == 200
        second = renew("inference")
        for path, status in (
            (PATH, 400),
            ("/v1/models/talker", 401),
        ):  # where OpenAI's clients ask, as they know it
            assert server.inference.post(path, headers=bearer(first)).status_code == status
        assert server.inference.post(PATH, headers=bearer(second)).status_code == 200
        assert server.management.get("/models", headers=bearer(manage)).status_code == 200
        assert server.management.get("/models", headers=bearer("api")).status_code == 400
        for headers in ({}, bearer(manage), bearer("wrong")):
            answer = server.management.post("/token", params={"type": "inference"}, headers=headers)
            assert answer.status_code == 400
            assert answer.json()["type"] == "InvalidKeyException"
            assert answer.json()["message"].startswith("Token Authentication failed. ")
        answer = server.management.get("/token", params={"type": "both"}, headers=bearer("api"))
        assert (answer.status_code, answer.json()["type"]) == (400, "InvalidKeyException")
        assert server.metrics.get("/metrics").status_code == 200
        assert (
            server.management.get(
                "/models/token/token", headers={"referer": "/token"} | bearer(manage)
            ).status_code
            == 404
        )


def test_a_head_that_is_known_is_asked_again_when_its_token_has_ended(
    tmp_path, start_server, until
):
    values = {
        "generate_tokens": True,
        "key_file": tmp_path / "key_file.json",
        "api_token": "api",
        "token_expiration_min": 0.05,
    }
    with start_server(**values) as server:
        server.register("talker.mar", initial_workers=1)
        server.management.get("/token", params={"type": "inference"}, headers=bearer("api"))
        headers = bearer(json.loads((tmp_path / "key_file.json").read_text())["inference"]["key"])
        assert server.inference.post(PATH, headers=headers).status_code == 200
        until(lambda: server.inference.post(PATH, headers=headers).status_code == 400)


def test_no_token_gets_into_the_log(tmp_path, start_server, caplog):
    with (
        caplog.at_level(logging.DEBUG),
        start_server(
            generate_tokens=True,
            key_file=tmp_path / "key_file.json",
            api_token="the-api-token",
            access_log=True,
        ) as server,
    ):
        server.management.get(
            "/token", params={"type": "management"}, headers=bearer("the-api-token")
        )
        reported = json.loads((tmp_path / "key_file.json").read_text())
        server.management.get("/models", headers=bearer(reported["management"]["key"]))
        server.inference.post(PATH, headers=bearer("a-wrong-token"))
    for text in (
        "the-api-token",
        "a-wrong-token",
        reported["management"]["key"],
        reported["inference"]["key"],
    ):
        assert text not in caplog.text


def test_without_made_up_tokens_there_is_nothing_to_renew(server):
    answer: httpx.Response = server.management.get("/token", params={"type": "inference"})
    assert (answer.status_code, answer.json()["type"]) == (404, "ResourceNotFoundException")
