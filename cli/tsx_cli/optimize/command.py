"""The command line of `tsx optimize`, with its exit codes."""

from __future__ import annotations

import sys

import typer

from tsx_cli.common.failure import FAILED, INTERRUPTED, UsageError
from tsx_cli.common.options import AsJson, read_settings, refuse_others
from tsx_cli.common.output import one_line
from tsx_cli.optimize import options

app = typer.Typer(add_completion=False)

# A resumed run takes all other options from the original run.
RESUME_OPTIONS = {"model", "resume", "time_limit", "keep", "as_json"}


@app.command("optimize")
def optimize_command(
    context: typer.Context,
    model: options.Model = None,
    inputs: options.Inputs = None,
    content_type: options.ContentType = None,
    rows: options.Rows = None,
    seed: options.Seed = 0,
    labels: options.Labels = None,
    max_loss: options.MaxLoss = None,
    tolerance: options.Tolerance = None,
    metric: options.Metric = None,
    forms: options.Forms = None,
    batch_sizes: options.BatchSizes = options.DEFAULT_SIZES,
    device: options.Device = None,
    time_limit: options.TimeLimit = options.DEFAULT_TIME,
    keep: options.KeepOf = options.Keep.BEST,
    remove: options.Remove = False,
    output: options.Output = None,
    resume: options.Resume = None,
    as_json: AsJson = False,
) -> None:
    """Find the fastest form of a model that still answers right.

    Example: `tsx optimize model.mar --input DIR --max-loss 'top1>=-0.5%'`. The command builds other
    ways to run the model (ONNX Runtime, OpenVINO, int8, bf16, ...), and measures each beside the
    model as it is. A form may only win if it answers inputs that it was not built with as well as
    the model does, within the loss that you accept. The best is written into the archive, next to
    the original, which serves wherever the form does not fit. Ctrl-C ends the run and reports what
    was measured. If no form is better, the archive stays as it is, and the exit code is 0.
    """
    # These modules import a server, which would slow --help down.
    from tsx_cli.archive.source import require_archive
    from tsx_cli.bench.report.write_back import check_writable
    from tsx_cli.bench.search.options import seconds
    from tsx_cli.common.output import print_json
    from tsx_cli.common.run_directory import new_directory
    from tsx_cli.optimize.report import show, write_report
    from tsx_cli.optimize.session import OptimizeRequest, resumed_optimization, run_optimization
    from tsx_cli.optimize.write_back import remove_forms

    settings, _ = read_settings(None)
    if remove:
        refuse_others(context, {"model", "remove"}, "--remove only removes forms")
        if model is None:
            raise UsageError("name an archive: tsx optimize model.mar --remove")
        print(one_line(remove_forms(model, settings)))
        return
    limit = seconds(time_limit, "--time-limit")
    if resume is not None:
        refuse_others(context, RESUME_OPTIONS, "--resume uses the options of the original run")
        request = resumed_optimization(resume, model, limit, keep, quiet=as_json)
    else:
        if model is None:
            raise UsageError("name an archive: tsx optimize model.mar --input DIR")
        run_options = options.OptimizeOptions(
            inputs=tuple(str(path.absolute()) for path in inputs or ()),
            content_type=content_type,
            labels=None if labels is None else str(labels.absolute()),
            max_loss=max_loss,
            tolerance=tolerance,
            metric=metric,
            forms=tuple(dict.fromkeys(filter(None, (forms or "").replace(" ", "").split(",")))),
            batch_sizes=batch_sizes,
            rows=rows,
            device=device,
            seed=seed,
        )
        require_archive(model)
        directory = new_directory("optimize", model, output)
        request = OptimizeRequest(model, run_options, directory, limit, keep, quiet=as_json)
    if keep is not options.Keep.NONE:
        check_writable(request.model, "--keep", "give --keep none")
    results = run_optimization(request, settings)
    write_report(results, request.directory)
    if as_json:
        print_json(results.model_dump(mode="json"))
    else:
        show(results)
        print(
            f"report: {one_line(request.directory / 'report.html')}, with report.md, results.csv"
            " and results.json beside it"
        )
    if not results.complete or any(form.state == "not tried" for form in results.forms):
        print(f"continue: tsx optimize --resume {one_line(request.directory)}", file=sys.stderr)
    if not results.complete:
        raise typer.Exit(INTERRUPTED)
    if all(form.state == "not tried" for form in results.forms):
        raise typer.Exit(FAILED)
