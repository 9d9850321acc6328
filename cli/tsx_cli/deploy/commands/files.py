"""The files of `tsx deploy --emit`."""

from __future__ import annotations

from pathlib import Path

from tsx_cli.common.inputs import SAMPLES
from tsx_cli.common.output import one_line, print_json
from tsx_cli.deploy.commands.options import DeploymentOptions
from tsx_cli.deploy.commands.show import Steps
from tsx_cli.deploy.commands.spec_file import read_spec, read_target
from tsx_cli.deploy.emit.github import NO_SAMPLES, command_arguments
from tsx_cli.deploy.emit.render import KINDS, WITHOUT_IMAGE, check_kind, emit
from tsx_cli.deploy.emit.write import write
from tsx_cli.deploy.engine.facts import read_archive
from tsx_cli.deploy.image.local import this_machine
from tsx_cli.deploy.targets import find_target


def emit_files(options: DeploymentOptions, kind: str, directory: Path, *, as_json: bool) -> None:
    """Write the files of `--emit`, without calling any platform."""
    given_target, steps = read_target(*options), Steps(quiet=as_json)
    target = check_kind(kind, given_target)
    spec = read_spec(options.file, {**options.values, "target": target})
    if given_target is None and len(KINDS[kind][0]) > 1:
        steps.say(f"the target is {target}, of {', '.join(KINDS[kind][0])}; --target names another")
    steps.say(f"reading {spec.model}")
    inspection, facts = read_archive(spec.model, image=spec.image or "")
    find_target(target).check_files(spec)
    needs_image = kind not in WITHOUT_IMAGE
    if needs_image:
        steps.say("looking up the base image, and building a wheel of tsx where it has no release")
    with this_machine(spec, needs_image) as local:
        emitted_files = emit(
            kind, spec, facts, local, command_arguments(*options) if kind == "github" else ()
        )
        paths = write(emitted_files, directory)
    if kind == "github" and not any(
        member.name.startswith(f"{SAMPLES}/") for member in inspection.members
    ):
        emitted_files = emitted_files._replace(notes=[*emitted_files.notes, NO_SAMPLES])
    if as_json:
        print_json(
            {
                "files": [str(path) for path in paths],
                "next": emitted_files.next_step,
                "notes": list(emitted_files.notes),
            }
        )
        return
    for path in paths:
        print(f"wrote {path}")
    for note in emitted_files.notes:
        print(one_line(f"note: {note}"))
    print(f"Next, in {directory}: {emitted_files.next_step}")
