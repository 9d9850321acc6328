"""Models for tables on a real server: bare files and archives, many clients, and pickles."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.servers import FREE_PORTS, serving, tsx

pytest.importorskip("skops")

from tests.runtime.features.tabular.conftest import SPECIES, iris


@pytest.mark.nightly
def test_many_clients_share_batches_and_wrong_rows_are_errors_of_clients(
    saved: Path, estimators: dict[str, Any], tmp_path: Path, user_environment: Mapping[str, str]
) -> None:
    table = iris()[0]
    expected = estimators["forest"].predict(table).tolist()
    arguments = ["serve", saved / "forest.skops", "--workers", "1", *FREE_PORTS]
    with serving(arguments, tmp_path, user_environment) as server:
        url = f"{server.address('predictions')}/predictions/forest"
        with httpx.Client(timeout=60) as client, ThreadPoolExecutor(24) as pool:
            answers = list(
                pool.map(
                    lambda row: client.post(url, json=row), [*table.to_dict("records"), {"a": 1}]
                )
            )
            metrics = client.get(f"{server.address('metrics')}/metrics").text
            (version,) = client.get(f"{server.address('models')}/models/forest").json()
        assert [answer.json()["prediction"] for answer in answers[:-1]] == expected
        assert answers[-1].status_code == 422
        assert [fault["loc"] for fault in answers[-1].json()["detail"]] == [
            ["body", name] for name in "bcd"
        ]
        assert answers[-1].headers["content-type"] == "application/json"
        assert list(version["signature"]["input"]["properties"]) == list("abcd")
        counts = {
            name: float(value)
            for line in metrics.splitlines()
            for name, _, value in [line.rpartition(" ")]
            if not line.startswith("#")
        }
        batches = next(v for k, v in counts.items() if k.startswith("tsx_batch_size_count{"))
        assert batches < len(answers)
        assert server.stop() == 0


@pytest.mark.nightly
def test_archives_answer_as_the_files_and_a_pickle_needs_trust_again(
    saved: Path,
    boosters: dict[str, Any],
    trees: dict[str, Any],
    tmp_path: Path,
    user_environment: Mapping[str, str],
) -> None:
    names = ["forest.skops", "flowers.json", "categories.ubj", "two.txt"]
    for name in names:
        result = tsx(["archive", saved / name, "--check", "-f"], tmp_path, user_environment)
        assert result.returncode == 0, result.stderr
        assert "handler tabular: columns in, predictions out, as JSON" in result.stdout
        assert "1 sample got the same answers in batches of" in result.stdout
    pickle = saved / "forest.joblib"
    result = tsx(["archive", pickle, "-o", "p.mar"], tmp_path, user_environment)
    assert (result.returncode, "skops.io.dump" in result.stderr) == (1, True)
    command = ["archive", pickle, "-o", "p.mar", "--name", "risky", "--check", "--trust-pickle"]
    result = tsx(command, tmp_path, user_environment)
    assert result.returncode == 0, result.stderr
    result = tsx(["serve", "p.mar", *FREE_PORTS], tmp_path, user_environment)
    assert (result.returncode, "loading a pickle runs any code" in result.stderr) == (1, True)
    for trust in (["--trust-pickle"], ["--set", "trust_pickle=risky"]):
        arguments = ["serve", "p.mar", *trust, "--workers", "1", *FREE_PORTS]
        with serving(arguments, tmp_path, user_environment) as server:
            url = f"{server.address('predictions')}/predictions/risky"
            answer = httpx.post(
                url, content="a,b,c,d\n5,3,1,0\n", headers={"content-type": "text/csv"}
            )
            assert answer.json()[0]["prediction"] in SPECIES
    archives = [f"{Path(name).stem}.mar" for name in ("two.txt", "categories.ubj")]
    with serving(
        ["serve", *archives, "--workers", "1", *FREE_PORTS], tmp_path, user_environment
    ) as server:
        for name in ("two", "categories"):
            person = {"age": 30, "city": "Ulm", "zip": "01", "paid": True}
            url = f"{server.address('predictions')}/predictions/{name}"
            assert set(httpx.post(url, json=person).json()["probabilities"]) == {"0", "1"}
            person["age"] = "old"
            answer = httpx.post(url, json=[person])
            assert (answer.status_code, answer.json()["detail"][0]["loc"]) == (
                422,
                ["body", 0, "age"],
            )
