"""script/train_config.py and script/flash_attention_config.py: train a model, as `mqo train`."""

from __future__ import annotations

import sys
from pathlib import Path

from mqo.display import Display
from mqo.launch.arguments import config_from, listing, machine_of, parser, split_flags
from mqo.launch.coverage import differing_of
from mqo.launch.finished import finished
from mqo.launch.preview import print_preview
from mqo.launch.run import run
from mqo.launch.start_weights import check_data
from mqo.output import folder_of
from mqo.project import Project
from mqo.runs import RunFolder
from mqo.terminal import guarded
from mqo.track.session import check as check_tracker


def main(front_end: bool = False) -> None:
    """Train a model, or list the valid names.

    `front_end` is the command line that quantizes only attention.
    """
    guarded(lambda: train_with(sys.argv[1:], front_end))


def train_with(argv: list[str], front_end: bool = False, program: str | None = None) -> None:
    """Train with these arguments; `program` is the command's name in its help."""
    own, extra = split_flags(argv)
    args = parser(front_end, program).parse_intermixed_args(own)
    if args.version:
        print(Project.here().version())
        return
    if args.list:
        print(listing(front_end))
        return
    if args.tracker is not None:
        check_tracker(args.tracker)
    check_data(args)
    machine = machine_of(args)
    config = config_from(args, extra, machine)
    for folder in filter(None, (args.checkpoint, args.tensorboard)):
        folder_of(folder)
    project = Project.here(args.runs and folder_of(args.runs))
    if args.dry_run:
        print_preview(project, config, machine, args)
        return
    say = Display.on(sys.stdout)
    if (done := finished(config)) is not None:
        say(f"finished : {done.line()}")
        return
    result = run(
        project,
        config,
        allow_edits=args.allow_edits,
        report=say,
        tracker=args.tracker,
        take_lock=args.take_lock,
    )
    say(f"result   : {result.line()}")
    for line in differing_of(RunFolder(Path(result.run))):
        say(f"         : {line}")
    say(f"folder   : {result.run}")
