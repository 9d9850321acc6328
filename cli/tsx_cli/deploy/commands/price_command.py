"""`tsx deploy prices`: what is kept of AWS's price list, and how old that is."""

from __future__ import annotations

from datetime import date

from tsx_cli.common.failure import CliError
from tsx_cli.common.output import print_json
from tsx_cli.deploy.aws.session import Cloud
from tsx_cli.deploy.preflight.price_list import fetch_prices
from tsx_cli.deploy.preflight.prices import REFRESH, Region, keep_prices, price_file, read_prices


def show_prices(region: str | None, profile: str | None, *, refresh: bool, as_json: bool) -> None:
    if refresh:
        cloud = Cloud(region, profile)
        found = fetch_prices(cloud, date.today())
        if not (found.instances or found.functions):
            raise CliError(f"AWS's price list has nothing of {cloud.region}: is the region right? What was there is kept")
        keep_prices(cloud.region, found)
    prices = read_prices()
    regions = {name: each for name, each in prices.regions.items() if region in (None, name)}
    if as_json:
        print_json(prices.model_copy(update={"regions": regions}).model_dump(mode="json", exclude_none=True))
        return
    if not regions:
        where, words = (f" of {region}", f" --region {region}") if region else ("", " --region REGION")
        raise CliError(f"there are no prices{where} on this machine: {REFRESH}{words}")
    for name, each in sorted(regions.items()):
        print(f"{name}: {_prices_text(each)}, as of {each.date}")
    print(f"in {price_file()}, of {prices.source}: US dollars, on demand, without taxes, transfer and storage")


def _prices_text(region: Region) -> str:
    sizes = len(region.serverless)
    parts = [f"{len(region.instances)} instance types of SageMaker"] if region.instances else []
    parts += [f"{sizes} size{'' if sizes == 1 else 's'} of serverless endpoints"] if sizes else []
    parts += ["Lambda"] if region.functions else []
    return f"prices of {', '.join(parts)}"
