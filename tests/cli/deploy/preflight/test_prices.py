"""What a deployment costs: by a dated file of list prices that is asked of AWS, and unknown where that says nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.stub import Stubber

from tsx_cli.common.failure import CliError
from tsx_cli.deploy.aws.session import Cloud
from tsx_cli.deploy.commands.spec_file import read_spec
from tsx_cli.deploy.preflight.limits import GIB
from tsx_cli.deploy.preflight.price_list import fetch_prices
from tsx_cli.deploy.preflight.prices import Prices, cost, keep_prices, read_prices
from tsx_cli.deploy.spec import DeploySpec
from tsx_cli.main import main

TODAY = date(2026, 11, 21)
REGION = "eu-central-1"


def product(usage: str, unit: str, price: str, begin: str = "0", **said: str) -> str:
    """One entry of PriceList, with the keys that the service's documentation shows."""
    dimension = {"unit": unit, "beginRange": begin, "endRange": "Inf", "pricePerUnit": {"USD": price}, "rateCode": "x"}
    return json.dumps(
        {
            "product": {"productFamily": "x", "attributes": {"usagetype": usage, "regionCode": REGION, **said}, "sku": "X"},
            "serviceCode": "x",
            "terms": {"OnDemand": {"X.Y": {"priceDimensions": {"X.Y.Z": dimension}, "sku": "X", "effectiveDate": "2026-11-01T00:00:00Z"}}},
            "publicationDate": "2026-11-20T00:00:00Z",
        }
    )


HOSTING = [
    product("EUC1-Host:ml.c6i.xlarge", "Hrs", "0.2330000000", memory="8 GiB", gpu="N/A", component="Hosting"),
    product("EUC1-Host:ml.g5.xlarge", "Hrs", "1.7610000000", memory="16 GiB", gpu="1", component="Hosting"),
    product("EUC1-Host:ml.odd.xlarge", "Quarters", "1.0", memory="16 GiB"),
    product("EUC1-Host:ml.free.xlarge", "Hrs", "0.0", memory="16 GiB"),
]
ASYNC = [product("EUC1-AsyncInf:ml.c6i.xlarge", "Hrs", "0.25", memory="8 GiB")]
SERVERLESS = [product("EUC1-ServerlessInf:Mem-4GB", "Seconds", "0.00008")]
LAMBDA = [
    product("EUC1-Request", "Requests", "0.0000002"),
    product("EUC1-Lambda-GB-Second", "Lambda-GB-Second", "0.0000133", begin="15000000000"),
    product("EUC1-Lambda-GB-Second", "Lambda-GB-Second", "0.0000166667"),
    product("EUC1-Lambda-GB-Second-ARM", "Lambda-GB-Second", "0.0000133334"),
    product("EUC1-Lambda-Provisioned-Concurrency", "Lambda-GB-Second", "0.0000041667"),
    product("EUC1-Lambda-Edge-Request", "Requests", "0.0000006"),
]


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Cloud]:
    """Whose price list answers as its model in botocore says, in pages."""
    for name, value in {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "XDG_CACHE_HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    client = boto3.session.Session(region_name="us-east-1").client("pricing")
    stub = Stubber(client)
    pages = {"Host:ml.": HOSTING, "AsyncInf:ml.": ASYNC, "ServerlessInf:Mem-": SERVERLESS, "": LAMBDA}
    for usage, products in pages.items():
        filters = [{"Type": "TERM_MATCH", "Field": "regionCode", "Value": REGION}]
        filters += [{"Type": "CONTAINS", "Field": "usagetype", "Value": usage}] if usage else []
        given: dict[str, Any] = {"ServiceCode": "AmazonSageMaker" if usage else "AWSLambda", "Filters": filters, "FormatVersion": "aws_v1"}
        stub.add_response("get_products", {"FormatVersion": "aws_v1", "PriceList": products[:1], "NextToken": "more"}, given)
        stub.add_response("get_products", {"FormatVersion": "aws_v1", "PriceList": products[1:]}, given | {"NextToken": "more"})
    monkeypatch.setattr(
        Cloud, "client", lambda self, service, region=None: client if (service, region) == ("pricing", "us-east-1") else None
    )
    with stub:
        yield Cloud(REGION)


def spec(**more: Any) -> DeploySpec:
    given: Mapping[str, Any] = {"name": "m", "target": "sagemaker", "model": "m.mar"}
    return read_spec(None, {**given, **more})


@pytest.fixture
def prices(cloud: Cloud) -> Prices:
    return Prices(regions={REGION: fetch_prices(cloud, TODAY)})


def test_prices_are_read_as_aws_gives_them_and_what_has_another_unit_is_left_out(prices: Prices) -> None:
    found = prices.regions[REGION]
    assert sorted(found.instances) == ["ml.c6i.xlarge", "ml.g5.xlarge"]
    small, gpu = found.instances["ml.c6i.xlarge"], found.instances["ml.g5.xlarge"]
    assert (small.hour, small.asynchronous_hour, small.memory, small.gpus) == (0.233, 0.25, 8 * GIB, 0)
    assert (gpu.hour, gpu.memory, gpu.gpus) == (1.761, 16 * GIB, 1)
    assert found.serverless == {4: 0.00008}
    function = found.functions["x86_64"]
    assert (function.request, function.gb_second, function.provisioned_gb_second) == (2e-7, 0.0000166667, 0.0000041667)
    assert found.functions["arm64"].gb_second == 0.0000133334


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"instances": 2}, "cost: $0.47 an hour, $340.18 a month, for 2 of ml.c6i.xlarge at $0.23 (list prices of 2026-11-21)"),
        ({"autoscaling": {"min": 1, "max": 4}}, "cost: $0.23 to $0.93 an hour, $170.09 to $680.36 a month, for 1 to 4 of ml.c6i.xlarge"),
        ({"asynchronous": {"output": "s3://b/o"}}, "cost: $0.25 an hour, $182.50 a month, for 1 of ml.c6i.xlarge at $0.25"),
        ({"serverless": {"memory": 4096}}, "cost: $0.00 an hour, $0.00 a month, for an idle serverless endpoint; while it works, $0.29"),
        (
            {"instance_type": "ml.p9.big"},
            "cost: unknown, because the prices of 2026-11-21 do not include ml.p9.big: check the name, or run tsx deploy prices",
        ),
        (
            {"serverless": {"memory": 2048}},
            "cost: unknown, because the prices of 2026-11-21 have none of a serverless endpoint with 2048 MB",
        ),
        ({"serverless": {"provisioned": 1}}, "cost: unknown, because the price list has provisioned concurrency"),
        (
            {"component": {"endpoint": "shared", "max_instances": 2}, "instances": 5},
            "cost: $0.00 to $0.47 an hour, $0.00 to $340.18 a month, for 0 to 2 of ml.c6i.xlarge at $0.23, which all models on "
            "the endpoint shared share",
        ),
        (
            {"multi_model": {"endpoint": "shared"}, "instances": 2},
            "cost: $0.47 an hour, $340.18 a month, for 2 of ml.c6i.xlarge at $0.23, which all models on the endpoint shared share",
        ),
    ],
)
def test_an_endpoint_costs_what_its_instances_do(prices: Prices, more: dict[str, Any], said: str) -> None:
    assert cost(spec(sagemaker=more), REGION, prices).lines(TODAY)[0].startswith(said)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            {"memory": 2048},
            ["cost: $0.00 an hour, $0.00 a month, for a function at rest with 2048 MiB", "and $3.53 for a million requests"],
        ),
        ({"memory": 2048, "provisioned": 2}, ["cost: unknown, because the prices of 2026-11-21 do not have all of Lambda on x86_64"]),
        ({"architecture": "arm64"}, ["cost: unknown, because the prices of 2026-11-21 do not have all of Lambda on arm64"]),
        ({"managed_instances": {"provider": "x"}}, ["cost: unknown, because Managed Instances are EC2 instances of your account"]),
    ],
)
def test_a_function_costs_by_its_requests(prices: Prices, more: dict[str, Any], said: list[str]) -> None:
    lines = cost(spec(target="lambda", **{"lambda": more}), REGION, prices, request_ms=100.0).lines(TODAY)
    assert [line.strip().startswith(each) for line, each in zip(lines, said, strict=True)] == [True] * len(said), lines


def test_concurrency_that_is_kept_costs_while_nobody_asks(prices: Prices) -> None:
    prices.regions[REGION].functions["x86_64"].provisioned_use = 0.0000097222
    own = {"memory": 1024, "autoscaling": {"min": 2, "max": 4}}
    reported = cost(spec(target="lambda", **{"lambda": own}), REGION, prices)
    assert reported.lines(TODAY)[0].startswith("cost: $0.030 to $0.060 an hour, $21.90 to $43.80 a month, for 2 kept ready with 1024 MiB")
    assert reported.lines(TODAY)[1].strip().startswith("the cost per request is unknown, because its archive was never measured")


def test_machines_of_ones_own_have_no_price(prices: Prices) -> None:
    assert (
        cost(spec(target="container"), "", prices).lines(TODAY)[0].startswith("cost: unknown, because the machines are your own; `tsx plan")
    )


def test_what_is_not_known_is_said_to_be_unknown_and_never_nothing(prices: Prices) -> None:
    reported = cost(spec(), "us-west-2", prices)
    assert reported.lines(TODAY) == [
        "cost: unknown, because there are no prices for us-west-2 on this machine: tsx deploy prices --refresh"
    ]
    assert (reported.as_json()["per_hour"], reported.as_json()["per_month"], reported.as_json()["prices_of"]) == (None, None, None)


def test_old_prices_are_reported_to_be_old(prices: Prices) -> None:
    assert cost(spec(), REGION, prices).lines(date(2027, 3, 1))[-1].strip() == "these prices are 100 days old: tsx deploy prices --refresh"


def test_the_file_keeps_other_regions_and_a_damaged_one_is_reported(
    prices: Prices, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "prices.json"
    monkeypatch.setattr("tsx_cli.deploy.preflight.prices.price_file", lambda: place)
    keep_prices("us-east-1", prices.regions[REGION])
    keep_prices(REGION, prices.regions[REGION])
    assert read_prices().regions == {"us-east-1": prices.regions[REGION], REGION: prices.regions[REGION]}
    place.write_text("{")
    with pytest.raises(CliError, match=r"prices\.json is damaged: tsx deploy prices --refresh writes it again"):
        read_prices()
    keep_prices(REGION, prices.regions[REGION])
    assert list(read_prices().regions) == [REGION]


def test_a_person_refreshes_and_sees_them(cloud: Cloud, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy", "prices", "--region", REGION]) == 1
    assert f"there are no prices for {REGION} on this machine: tsx deploy prices --refresh --region {REGION}" in capsys.readouterr().err
    assert main(["deploy", "prices", "--refresh", "--region", REGION]) == 0
    assert f"{REGION}: prices of 2 instance types of SageMaker, 1 size of serverless endpoints, Lambda, as of " in capsys.readouterr().out
    assert main(["deploy", "prices", "--region", REGION, "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)["regions"][REGION]
    assert reported["instances"]["ml.g5.xlarge"]["hour"] == 1.761
