"""`mqo perf`: test the performance of a mode, or compare two results."""

from pathlib import Path
from typing import Annotated

import typer
from click.core import ParameterSource

from mqo.commands.options import (
    OWN_MODEL,
    AttentionGemmsOption,
    AxisOption,
    FlagsArgument,
    FormatsOption,
    GemmsOption,
    ModelClassOption,
    PluginOption,
    PluginOptionOption,
    RecipesOption,
    ShrinkOption,
    StrictOption,
    TextOption,
    TrainingOption,
    joined,
)

NoScaling = Annotated[
    bool, typer.Option("--no-scaling", help="Do not compare one process with two.")
]
Folder = Annotated[
    Path | None,
    typer.Option("-o", "--out", metavar="FOLDER", help="A new folder; by default below runs/perf."),
]
Compared = Annotated[
    tuple[Path, Path] | None,
    typer.Option(metavar="A B", help="Only compare step times of two such folders or runs."),
]
Repeats = Annotated[int, typer.Option(min=0, help="With --compare: replay A and B N times each.")]
AllowVersions = Annotated[
    bool,
    typer.Option("--allow-versions", help="With --compare: allow other versions or machines."),
]


# Options of --compare, by the names of the parameters.
_COMPARING = {"compare", "repeats", "allow_versions"}


def perf(
    context: typer.Context,
    model: Annotated[str | None, typer.Option(help=f"A model, {OWN_MODEL}.")] = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME,...", help="The modes to test; repeatable."),
    ] = None,
    recipes: RecipesOption = None,
    axis: AxisOption = None,
    baseline: Annotated[str, typer.Option(help="The mode to compare with.")] = "bf16",
    dataset: Annotated[
        str | None, typer.Option(help="A dataset; by default wikipedia, or the name of your text.")
    ] = None,
    text: TextOption = None,
    strict: StrictOption = False,
    tokenizer: Annotated[Path | None, typer.Option(help="With --text: a tokenizer folder.")] = None,
    training_config: TrainingOption = "smoke",
    shrink: ShrinkOption = None,
    model_class: ModelClassOption = None,
    gemms: GemmsOption = "fprop",
    attention_gemms: AttentionGemmsOption = "forward",
    formats: FormatsOption = None,
    plugin: PluginOption = None,
    plugin_option: PluginOptionOption = None,
    no_scaling: NoScaling = False,
    folder: Folder = None,
    compare: Compared = None,
    repeats: Repeats = 0,
    allow_versions: AllowVersions = False,
    flags: FlagsArgument = None,
) -> None:
    """Test a mode's precision, loss, determinism, speed and memory, and judge them on one page.

    Trains the baseline and, twice, the mode; then 12 steps on one process and on two.
    Several modes, recipes or values are tested one after the other, each in a folder of FOLDER.

    FOLDER gets perf.json, index.html, the trace of a few steps, and the runs.

    --compare instead compares two folders or runs: B's step time divided by A's.

    Exit 0 if no verdict fails, 1 if one does, 2 for errors.
    """
    from mqo.errors import MqoError, RunError
    from mqo.launch import own_data
    from mqo.launch.hybrid import check_class
    from mqo.launch.models import shrink_of
    from mqo.launch.own_types import OwnTypes
    from mqo.launch.variants import GemmChoice, check_set_once, variants, with_plugins
    from mqo.matrix import tables
    from mqo.perf import measure
    from mqo.perf.train import PerfOptions
    from mqo.perf.verdicts import tables as limits
    from mqo.project import Project

    try:
        _refuse_unread(context)
        if compare is not None:
            measure.compare(*compare, repeats=repeats, allow_versions=allow_versions)
            return
        if model is None or not (mode or recipes):
            raise MqoError(
                "--model, or one of --mode and --recipe, is missing",
                expected="--model with --mode or --recipe, or --compare A B",
            )
        own = OwnTypes.from_options(formats, plugin, plugin_option)  # before names are checked
        choice = GemmChoice.of_names(gemms, attention_gemms)
        (base,) = variants(tables.pick(tables.modes(), "quantization mode", baseline).name)
        check_set_once(axis or (), own.options)
        ways = variants(joined(mode) or "", joined(recipes) or "", axis or (), choice)
        choice.refuse_unread(ways)
        base, *chosen = with_plugins((base, *ways), own)
        tokens, extra = tokenizer and tokenizer.resolve(), tuple(flags or ())
        data = own_data.of_options(Project.here(), text or (), tokens, None, extra, strict=strict)
        dataset = dataset or (data.text.name if data.text else "wikipedia")
        rest = (base, dataset, training_config, choice, extra, limits().steps, data)
        size, kind = shrink_of(shrink), check_class(model_class)
        tests = [
            PerfOptions(model, variant, *rest, shrink=size, model_class=kind) for variant in chosen
        ]
        configs = [test.config_of(v, steps=1) for test in tests for v in (test.mode, base)]
        own.refuse_unused([config.quantization for config in configs])
        failed = measure.run_tests(tests, folder, scaling=not no_scaling)
    except RunError as error:
        error.exit_code = MqoError.exit_code  # 1 would say that a verdict failed
        raise
    raise typer.Exit(1 if failed else 0)


def _refuse_unread(context: typer.Context) -> None:
    """Raise MqoError for the options that this use of the command does not read."""
    from mqo.errors import MqoError

    given = [
        parameter
        for parameter in context.command.params
        if context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
    ]
    comparing = any(parameter.name == "compare" for parameter in given)
    unread = [parameter for parameter in given if (parameter.name in _COMPARING) != comparing]
    if unread:
        names = ", ".join(parameter.opts[0] for parameter in unread)
        raise MqoError(
            f"{'With' if comparing else 'Without'} --compare, {names} would have no effect",
            expected="--compare A B with --repeats and --allow-versions, or a test without them",
        )
