"""Generated tokens: their key file, expiry, renewal and secrecy."""

from __future__ import annotations

import json
import logging
import stat
from datetime import datetime, timezone

import pytest

from tests.kit.clock import Clock
from tsx_runtime.api.access.tokens import Keys, build_keys, generated_tokens, start_keys
from tsx_runtime.errors import BadRequest, InvalidToken, SettingError, TsxError
from tsx_runtime.settings.schema import Settings

PATH = "/predictions/talker"


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def generated(tmp_path, **values) -> Settings:
    defaults = {"generate_tokens": True, "key_file": tmp_path / "key_file.json"}
    return Settings.model_validate(defaults | values)


def read_keys(tmp_path):
    return json.loads((tmp_path / "key_file.json").read_text())


def test_the_key_file_has_torchserves_format_and_is_private(tmp_path):
    keys = start_keys(generated(tmp_path))
    file = tmp_path / "key_file.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    content = read_keys(tmp_path)
    assert list(content) == ["management", "inference", "API"]
    assert content["management"]["key"] == keys.management.token
    assert content["API"] == {"key": keys.api.token}
    end = datetime.fromisoformat(content["inference"]["expiration time"].replace("Z", "+00:00"))
    assert 3500 < (end - datetime.now(timezone.utc)).total_seconds() <= 3600
    assert len({keys.management.token, keys.inference.token, keys.api.token}) == 3
    keys.remove()
    assert not file.exists()


def test_an_existing_key_file_is_replaced_and_keeps_its_mode(tmp_path):
    file = tmp_path / "key_file.json"
    file.write_text("{}")
    file.chmod(0o644)
    start_keys(generated(tmp_path))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["key_file.json"]


def test_a_symlink_at_the_key_file_is_replaced_and_not_followed(tmp_path):
    (tmp_path / "victim").write_text("old")
    (tmp_path / "key_file.json").symlink_to(tmp_path / "victim")
    start_keys(generated(tmp_path))
    assert (tmp_path / "victim").read_text() == "old"
    assert stat.S_IMODE((tmp_path / "key_file.json").lstat().st_mode) == 0o600


def test_a_key_file_directory_writable_by_others_is_reported(tmp_path, caplog):
    start_keys(generated(tmp_path))
    assert caplog.text == ""
    tmp_path.chmod(0o777)
    start_keys(generated(tmp_path))
    assert "key_file: another user can replace" in caplog.text


def test_an_unwritable_key_file_prevents_the_start(tmp_path):
    with pytest.raises(SettingError, match="key_file"):
        start_keys(generated(tmp_path, key_file=tmp_path / "nowhere" / "key_file.json"))


def test_a_replacement_server_keeps_generated_tokens_and_their_expiry(tmp_path):
    clock = Clock()
    settings = generated(tmp_path, token_expiration_min=1, management_token="mine")
    keys = build_keys(settings, clock)
    clock.now += 40
    tokens = generated_tokens(keys, settings)
    assert tokens == {"inference": (keys.inference.token, 20), "api": (keys.api.token, None)}
    successor_keys = build_keys(settings, clock, tokens)
    assert [key.token for key in successor_keys[:3]] == [key.token for key in keys[:3]]
    assert (successor_keys.inference.lifetime, successor_keys.inference.seconds_left) == (60, 20)
    assert successor_keys.api.seconds_left is None


def test_an_expired_token_is_replaced_by_a_renewed_one(tmp_path):
    clock = Clock()
    keys = build_keys(generated(tmp_path, token_expiration_min=0.5), clock)
    key, header = keys.inference, b"Bearer " + keys.inference.token.encode()
    assert key.matches(header)
    clock.now += 29
    assert key.matches(header)
    clock.now += 1
    assert not key.matches(header)
    changes = []
    key.on_change.append(lambda: changes.append(True))
    keys.renew("inference")
    assert changes
    assert not key.matches(header)
    assert key.matches(b"Bearer " + key.token.encode())
    assert key.token in (tmp_path / "key_file.json").read_text()
    # The token of the API does not end.
    clock.now += 3600
    assert keys.api.matches(b"bearer " + keys.api.token.encode())


def test_renewing_one_token_keeps_the_expiry_of_the_other(tmp_path):
    keys = start_keys(generated(tmp_path))
    first = read_keys(tmp_path)
    keys.renew("inference")
    second = read_keys(tmp_path)
    assert second["management"] == first["management"]
    assert second["inference"] != first["inference"]
    keys.renew("management")
    assert read_keys(tmp_path)["inference"] == second["inference"]


def test_a_renewal_that_cannot_be_written_keeps_the_old_token(tmp_path):
    directory = tmp_path / "keys"
    directory.mkdir()
    keys = start_keys(generated(tmp_path, key_file=directory / "key_file.json"))
    old_token = b"Bearer " + keys.inference.token.encode()
    keys.remove()
    directory.rmdir()
    with pytest.raises(TsxError, match="The old one stays valid"):
        keys.renew("inference")
    assert keys.inference.matches(old_token)


def test_only_tokens_that_the_user_did_not_set_are_generated(tmp_path):
    keys = build_keys(generated(tmp_path, inference_token="mine"))
    assert keys.inference.token == "mine"
    assert keys.inference.seconds_left is None
    assert keys.management.seconds_left > 0
    with pytest.raises(BadRequest, match="cannot be changed while the server runs"):
        keys.renew("inference")
    tokens = {f"{name}_token": name for name in ("inference", "management", "api")}
    assert build_keys(generated(tmp_path, **tokens)).file is None


@pytest.mark.parametrize("kind", ["", "API", "api", "file", "nothing"])
def test_only_the_inference_and_management_tokens_can_be_renewed(tmp_path, kind):
    with pytest.raises(InvalidToken, match="management or inference"):
        start_keys(generated(tmp_path)).renew(kind)


def test_without_authorization_no_keys_are_generated(tmp_path):
    assert build_keys(generated(tmp_path, disable_token_authorization=True)) == Keys()


def test_a_renewed_token_replaces_the_old_one_at_once_on_both_lanes(tmp_path, start_server):
    values = {"key_file": tmp_path / "key_file.json", "api_token": "api"}
    with start_server(generate_tokens=True, **values) as server:
        server.register("talker.mar", initial_workers=1)

        def renew(kind: str) -> str:
            answer = server.management.get(f"/token?type={kind}", headers=bearer("api"))
            assert (answer.status_code, answer.text) == (200, "\n")
            return read_keys(tmp_path)[kind]["key"]

        def status(path: str, token: str) -> int:
            return server.inference.post(path, headers=bearer(token)).status_code

        first, manage = renew("inference"), renew("management")
        # The server has cached the head of the second request.
        assert [status(PATH, first) for _ in range(2)] == [200, 200]
        answer = server.inference.get("/v1/models/talker", headers=bearer(first))
        assert answer.status_code == 200
        second = renew("inference")
        # OpenAI's API answers a wrong token with 401.
        assert [status(path, first) for path in (PATH, "/v1/models/talker")] == [400, 401]
        assert status(PATH, second) == 200
        assert server.management.get("/models", headers=bearer(manage)).status_code == 200
        assert server.management.get("/models", headers=bearer("api")).status_code == 400
        for kind, headers in (
            ("inference", {}),
            ("inference", bearer(manage)),
            ("inference", bearer("wrong")),
            ("both", bearer("api")),
        ):
            answer = server.management.post(f"/token?type={kind}", headers=headers)
            assert (answer.status_code, answer.json()["type"]) == (400, "InvalidKeyException")
        assert server.metrics.get("/metrics").status_code == 200


def test_a_cached_request_head_is_checked_again_after_its_token_expired(
    tmp_path, start_server, until
):
    # A token ends after three seconds.
    values = {"key_file": tmp_path / "key_file.json", "token_expiration_min": 0.05}
    with start_server(generate_tokens=True, api_token="api", **values) as server:
        server.register("talker.mar", initial_workers=1)
        server.management.get("/token?type=inference", headers=bearer("api"))
        headers = bearer(read_keys(tmp_path)["inference"]["key"])
        assert server.inference.post(PATH, headers=headers).status_code == 200
        until(lambda: server.inference.post(PATH, headers=headers).status_code == 400)


def test_the_log_contains_no_token(tmp_path, start_server, caplog):
    values = {"key_file": tmp_path / "key_file.json", "api_token": "the-api-token"}
    with (
        caplog.at_level(logging.DEBUG),
        start_server(generate_tokens=True, access_log=True, **values) as server,
    ):
        headers = bearer("the-api-token")
        server.management.get("/token?type=management", headers=headers)
        keys = read_keys(tmp_path)
        server.management.get("/models", headers=bearer(keys["management"]["key"]))
        server.inference.post(PATH, headers=bearer("a-wrong-token"))
    tokens = (keys["management"]["key"], keys["inference"]["key"])
    for text in ("the-api-token", "a-wrong-token", *tokens):
        assert text not in caplog.text


def test_without_generated_tokens_renewal_is_refused(server):
    answer = server.management.get("/token?type=inference")
    assert (answer.status_code, answer.json()["type"]) == (404, "ResourceNotFoundException")
