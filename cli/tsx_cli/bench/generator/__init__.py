"""The load generator: a process of its own that asks a server as a plan says, and tells what came of it."""

from tsx_cli.bench.generator.plan import LoadPlan
from tsx_cli.bench.generator.result import LoadResult
from tsx_cli.bench.generator.run import Progress, measure, run_load

__all__ = ["LoadPlan", "LoadResult", "Progress", "measure", "run_load"]
