"""The cost of a deployment, from the dated list prices that `tsx deploy prices --refresh` stores.

There is no price in tsx itself: without the file, or for what it does not know, the cost is said to be unknown. Prices are in US dollars,
on demand, without taxes, transfer, storage and what is agreed on with AWS.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tsx_archiver import default_cache
from tsx_archiver.storage.atomic_file import whole_file
from tsx_archiver.storage.private_directory import private_directory
from tsx_cli.common.failure import CliError
from tsx_cli.deploy.spec import DeploySpec

FORMAT = 1
HOURS = 730  # of a month
OLD = 90  # days
REFRESH = "tsx deploy prices --refresh"


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore")


class Instance(_Part):
    """An instance of SageMaker's hosting."""

    hour: float | None = None  # USD
    asynchronous_hour: float | None = None
    memory: int | None = None  # bytes
    gpus: int | None = None


class LambdaPrices(_Part):
    gb_second: float | None = None
    request: float | None = None
    provisioned_gb_second: float | None = None  # for being there
    provisioned_use: float | None = None  # a GB-second that is used


class Region(_Part):
    date: date
    instances: dict[str, Instance] = Field(default_factory=dict)
    serverless: dict[int, float] = Field(default_factory=dict)  # memory in GiB: USD for a second
    functions: dict[str, LambdaPrices] = Field(default_factory=dict)  # by architecture


class Prices(_Part):
    format: int = FORMAT
    source: str = "AWS Price List Query API"
    regions: dict[str, Region] = Field(default_factory=dict)


@dataclass(frozen=True)
class Cost:
    """US dollars; None is unknown, and `why` says why. `busy` is what a million requests add, at the time of its benchmark."""

    hour: float | None = None  # at rest, or with the fewest instances
    most: float | None = None  # with as many instances as scaling may start
    busy: float | None = None
    on: date | None = None
    what: str = ""
    why: str = ""

    def as_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"currency": "USD", "prices_of": None if self.on is None else self.on.isoformat(), "of": self.what}
        fields |= {"per_hour": self.hour, "per_hour_at_most": self.most, "per_million_requests": self.busy}
        fields["per_month"] = None if self.hour is None else round(self.hour * HOURS, 2)
        if self.why:
            fields["unknown"] = self.why
        return fields

    def lines(self, today: date) -> list[str]:
        if self.hour is None:
            return [f"cost: unknown, because {self.why}"]
        bounds = [self.hour] if self.most in (None, self.hour) else [self.hour, self.most or 0]
        hour, month = (" to ".join(money(each * hours) for each in bounds) for hours in (1, HOURS))
        lines = [f"cost: {hour} an hour, {month} a month, for {self.what} (list prices of {self.on})"]
        if self.busy is not None:
            lines.append(f"      and {money(self.busy)} for a million requests as long as in its benchmark")
        elif self.why:
            lines.append(f"      the cost per request is unknown, because {self.why}")
        if self.on is not None and (today - self.on).days > OLD:
            lines.append(f"      these prices are {(today - self.on).days} days old: {REFRESH}")
        return lines


def cost(spec: DeploySpec, region: str, prices: Prices, request_ms: float | None = None) -> Cost:
    """`request_ms`: how long the model works on one request, where that was measured."""
    if spec.target not in ("sagemaker", "lambda"):
        return Cost(why="the machines are your own; `tsx plan MODEL.mar --rps N --price-per-hour P` uses your own price")
    known = prices.regions.get(region)
    if known is None:
        return Cost(why=f"there are no prices for {region} on this machine: {REFRESH}")
    return _endpoint(spec, known) if spec.target == "sagemaker" else _function(spec, known, request_ms)


def _function(spec: DeploySpec, known: Region, request_ms: float | None) -> Cost:
    """Free without requests, except for provisioned concurrency; a request costs by its duration and the memory."""
    own, gib = spec.lambda_, spec.lambda_.memory / 1024
    if own.managed_instances is not None:
        return Cost(on=known.date, why="Managed Instances are EC2 instances of your account, which Lambda chooses")
    listed = known.functions.get(own.architecture, LambdaPrices())
    # of a function with provisioned concurrency even the work has another price
    is_kept = own.provisioned is not None or own.autoscaling is not None
    second = listed.provisioned_use if is_kept else listed.gb_second
    if second is None or listed.request is None or (is_kept and listed.provisioned_gb_second is None):
        return Cost(on=known.date, why=f"the prices of {known.date} do not have all of Lambda on {own.architecture}: {REFRESH}")
    fewest, most = own.provisioned or 0, None
    if own.autoscaling is not None:
        fewest, most = own.autoscaling.min, own.autoscaling.max
    kept = (listed.provisioned_gb_second or 0.0) * gib * 3600
    what = f"a function at rest with {own.memory} MiB" if not is_kept else f"{fewest} kept ready with {own.memory} MiB"
    busy = None if request_ms is None else 1e6 * (listed.request + second * gib * request_ms / 1000)
    why = "" if busy is not None else "its archive was never measured (tsx bench --write)"
    return Cost(fewest * kept, None if most is None else most * kept, busy, known.date, what, why)


def _endpoint(spec: DeploySpec, known: Region) -> Cost:
    own = spec.sagemaker
    if own.serverless is not None:
        return _serverless(own.serverless.memory, own.serverless.provisioned, known)
    kind = own.instance_type
    found = known.instances.get(kind, Instance())
    price = found.hour if own.asynchronous is None else found.asynchronous_hour
    if price is None:
        return Cost(on=known.date, why=f"the prices of {known.date} do not include {kind}: check the name, or run {REFRESH}")
    fewest = own.instances if own.autoscaling is None else own.autoscaling.min
    most = None if own.autoscaling is None else own.autoscaling.max
    shared = own.component or own.multi_model
    if own.component is not None:  # its instances follow the copies of all components
        fewest, most = own.component.min_instances, own.component.max_instances
    of_all = f", which all models on the endpoint {shared.endpoint} share" if shared is not None else ""
    many = f"{fewest}" if most is None else f"{fewest} to {most}"
    return Cost(fewest * price, None if most is None else most * price, on=known.date, what=f"{many} of {kind} at {money(price)}{of_all}")


def _serverless(memory: int, provisioned: int | None, known: Region) -> Cost:
    if provisioned is not None:
        return Cost(
            on=known.date, why="the price list has provisioned concurrency of a serverless endpoint in a format that tsx cannot read"
        )
    second = known.serverless.get(memory // 1024)
    if second is None:
        return Cost(on=known.date, why=f"the prices of {known.date} have none of a serverless endpoint with {memory} MB: {REFRESH}")
    return Cost(0.0, on=known.date, what=f"an idle serverless endpoint; while it works, {money(second * 3600)} an hour")


def money(value: float) -> str:
    return f"${value:,.2f}" if value >= 0.1 or value == 0 else f"${value:#.2g}"


def read_prices() -> Prices:
    """None of any region where there is no file. Raises CliError for one that is damaged."""
    path = price_file()
    try:
        return Prices.model_validate(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return Prices()
    except (ValueError, ValidationError, RecursionError) as error:
        raise CliError(f"{path} is damaged: {REFRESH} writes it again") from error


def keep_prices(region: str, found: Region) -> None:
    """Beside those of other regions."""
    path = price_file()
    try:
        prices = read_prices()
    except CliError:
        prices = Prices()
    prices.regions[region] = found
    private_directory(path.parent)
    with whole_file(path, mode=0o600) as file:
        file.write(prices.model_dump_json(indent=1, exclude_none=True).encode() + b"\n")


def price_file() -> Path:
    return default_cache() / "prices.json"


def machine(prices: Prices, region: str, instance_type: str) -> Instance:
    """What the list says of a kind of instance; nothing where it is not there."""
    known: Mapping[str, Instance] = prices.regions[region].instances if region in prices.regions else {}
    return known.get(instance_type, Instance())
