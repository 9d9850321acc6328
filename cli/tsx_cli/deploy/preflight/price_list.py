"""Fetches the list prices of AWS for one region: SageMaker hosting and serverless inference, and Lambda.

https://docs.aws.amazon.com/awsaccountbilling/latest/aboutv2/using-price-list-query-api.html. What has another unit than is expected is
left out: no price is better than a wrong one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import date
from typing import Any

from tsx_cli.deploy.aws.session import Cloud, translated_errors
from tsx_cli.deploy.preflight.limits import GIB
from tsx_cli.deploy.preflight.prices import Instance, LambdaPrices, Region

SERVED_FROM = "us-east-1"  # the service has few addresses, and each has the prices of all regions
_AREA = r"(?:[A-Z]+\d*-)?"  # what stands before a usage type outside of Virginia
_INSTANCE = re.compile(_AREA + r"(Host|AsyncInf):(ml\.[\w.-]+)")
_SERVERLESS = re.compile(_AREA + r"ServerlessInf:Mem-(\d+)GB")
_FUNCTION = re.compile(_AREA + r"(Request|Lambda-GB-Second|Lambda-Provisioned-Concurrency|Lambda-Provisioned-GB-Second)(-ARM)?")
_KEYS = {
    "Request": "request",
    "Lambda-GB-Second": "gb_second",
    "Lambda-Provisioned-Concurrency": "provisioned_gb_second",
    "Lambda-Provisioned-GB-Second": "provisioned_use",
}


def fetch_prices(cloud: Cloud, today: date) -> Region:
    """Raises CloudError."""
    found = Region(date=today)
    for usage in ("Host:ml.", "AsyncInf:ml.", "ServerlessInf:Mem-"):
        add_sagemaker(found, _products(cloud, "AmazonSageMaker", usage))
    add_lambda(found, _products(cloud, "AWSLambda"))
    return found


def _products(cloud: Cloud, service: str, usage: str = "") -> Iterator[Mapping[str, Any]]:
    filters = [{"Type": "TERM_MATCH", "Field": "regionCode", "Value": cloud.region}]
    if usage:
        filters.append({"Type": "CONTAINS", "Field": "usagetype", "Value": usage})
    with translated_errors(f"asking for the prices of {service} (pricing:GetProducts)"):
        pages = cloud.client("pricing", SERVED_FROM).get_paginator("get_products")
        for page in pages.paginate(ServiceCode=service, Filters=filters, FormatVersion="aws_v1"):
            yield from map(json.loads, page["PriceList"])


def add_sagemaker(found: Region, products: Iterable[Mapping[str, Any]]) -> None:
    for product in products:
        attributes = product["product"]["attributes"]
        usage = attributes.get("usagetype", "")
        if match := _INSTANCE.fullmatch(usage):
            price = _price(product, "hrs", "hours", "hour")
            if price is not None:
                own = found.instances.setdefault(match[2], Instance())
                setattr(own, "hour" if match[1] == "Host" else "asynchronous_hour", price)
                own.memory, own.gpus = (
                    _memory(attributes.get("memory", "")) or own.memory,
                    _count(attributes) if own.gpus is None else own.gpus,
                )
        elif match := _SERVERLESS.fullmatch(usage):
            price = _price(product, "seconds", "second", "sec")
            if price is not None:
                found.serverless[int(match[1])] = price


def add_lambda(found: Region, products: Iterable[Mapping[str, Any]]) -> None:
    for product in products:
        match = _FUNCTION.fullmatch(product["product"]["attributes"].get("usagetype", ""))
        if match is None:
            continue
        price = _price(product, *(("requests", "request") if match[1] == "Request" else ("lambda-gb-second", "second", "seconds")))
        if price is not None:
            setattr(found.functions.setdefault("arm64" if match[2] else "x86_64", LambdaPrices()), _KEYS[match[1]], price)


def _price(product: Mapping[str, Any], *units: str) -> float | None:
    """Dollars on demand, of the first units where more of them cost less."""
    for term in product.get("terms", {}).get("OnDemand", {}).values():
        for dimension in term["priceDimensions"].values():
            price = float(dimension["pricePerUnit"].get("USD", 0))
            if price > 0 and dimension.get("beginRange", "0") == "0" and dimension["unit"].lower() in units:
                return price
    return None


def _memory(text: str) -> int | None:
    match = re.fullmatch(r"([\d,.]+)\s*(?:GiB|GB)?", text.strip())
    return round(float(match[1].replace(",", "")) * GIB) if match else None


def _count(attributes: Mapping[str, str]) -> int | None:
    """GPUs, which the list counts where there are any, and calls N/A where there are none."""
    text = attributes.get("gpu") or attributes.get("physicalGpu") or ""
    return int(text) if text.isdigit() else 0 if text.upper() in ("N/A", "NA") else None
