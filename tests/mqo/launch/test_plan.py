"""The layouts that the launcher chooses: they fit, they divide, and a resumed run keeps its own."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from mqo.errors import CheckpointError, ConvertError, LayoutError, MqoError, UnknownNameError
from mqo.launch import arguments, plan, preview
from mqo.launch.command import from_shell
from mqo.launch.config import Cluster, Placement, resolve
from mqo.launch.layout import check_layout
from mqo.launch.machine import Machine, imagined
from mqo.launch.plan import decides, layout_of, plan_layout, saved_layout
from mqo.launch.prepare import check_config
from mqo.matrix import generate, tables
from mqo.megatron.run.files import TRACKER
from mqo.project import Project
from mqo.recipes import recipe as recipes
from mqo.scale.choose import Workload, measure
from mqo.scale.devices import DEVICES, GIB, usable
from mqo.scale.layout import BUCKET, Layout
from mqo.scale.weights import rank_weights

from ..scale.arithmetic import of_mode

SCRIPTS = Project.here().root / "script"
NAMES = [str(path) for path, _ in generate.scripts()]
H100 = imagined("h100-80gb", 8)
LIMIT = usable(DEVICES["h100-80gb"].memory)
EVERY = {"--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"}


def cell(model="llama31-8b", mode="FA_linear_mxfp8", gpus=8, training="standard", flags="", **rest):
    per_node = min(gpus, 8)
    where = Cluster(nnodes=gpus // per_node, nproc_per_node=per_node)
    own = tuple(flags.split())
    if "recipe" in rest:
        rest["recipe"] = recipes.read(rest["recipe"])
    return resolve(model, "wikipedia", mode, training, cluster=where, extra_flags=own, **rest)


def plan_of(made, machine=H100):
    """The plan of a cell that resumes nothing: no tree is read."""
    return plan_layout(Path("unread"), made, machine, made.quantization.types)


def lines_of(made):
    """The launcher's lines on the layout of a cell."""
    return plan_of(made)[1]


def planned(made, machine=H100):
    """The layout that the launcher chooses for a cell."""
    chosen = plan_of(made, machine)[0].placement
    return layout_of(chosen.layout, chosen.cluster.processes)


def need(made, layout):
    """Bytes of a GPU, for the cell's own sizes."""
    of = made.experiment
    mode = of_mode(tables.modes()[made.quantization.mode], of.dtype)
    sizes = (layout.gpus, made.placement.cluster.nproc_per_node, 0)
    return measure(Workload(of.model, of.training, mode, of.dtype, *sizes), layout).need


# -- the scripts -----------------------------------------------------------------------------------


def of_script(name, *words):
    """The arguments of a committed script's own words and of `words`."""
    text = (SCRIPTS / name).read_text().partition('train_config.py"')[2]
    own = [word for word in shlex.split(text, comments=True) if word.strip() and word != "$@"]
    return arguments.parser().parse_intermixed_args([*own, *words])


@pytest.mark.parametrize("nodes", [1, 8])
@pytest.mark.parametrize("name", NAMES)
def test_each_scripts_dry_run_prints_a_layout_that_fits(name, nodes, tmp_path):
    made = arguments.config_from(of_script(name, "--nnodes", str(nodes)), [], H100)
    config, lines = plan_of(made)
    printed = preview.preview_text(Project(tmp_path), config, H100, {}, lines)
    comments = [line for line in printed.splitlines() if line.startswith("#")]
    command, _ = from_shell(printed[printed.index("MQO_QUANT_CONFIG") :])
    assert command[command.index("--nproc-per-node") + 1] == "8"
    assert set(command) >= EVERY
    layout = layout_of(command, 8 * nodes)
    check_layout(made.with_layout(layout.flags()))
    used = need(made, layout)
    assert used <= LIMIT
    (said,) = [line for line in comments if line.startswith("# layout: ")]
    assert f"simulated: {used / GIB:.1f} of {LIMIT / GIB:.1f} GiB usable" in said
    assert f"DP {layout.data}, distributed optimizer" in said


def test_a_script_itself_plans_for_machines_that_are_not_there(tmp_path):
    words = ["--dry-run", "--device", "h100-80gb", "--nnodes", "8", "--nproc-per-node", "8"]
    script = SCRIPTS / "deepseek2_lite/pretrain_deepseek2_lite_wikipedia_FA_linear_mxfp8.sh"
    done = subprocess.run(["bash", script, *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    command, _ = from_shell(done.stdout[done.stdout.index("MQO_QUANT_CONFIG") :])
    assert layout_of(command, 64) == Layout(64, expert=4)
    assert "--expert-model-parallel-size 4" in done.stdout


@pytest.mark.parametrize(
    ("words", "how"),
    [
        ({"mode": "mxfp8"}, "simulated"),
        ({"mode": "mxfp8", "gemms": "all"}, "computed"),
        ({"mode": "qk_pv_mxfp8"}, "simulated"),
        ({"mode": "qk_pv_mxfp8", "attention_gemms": "all"}, "computed"),
        ({"mode": "bf16", "recipe": "nvfp4"}, "computed"),
        ({"mode": "mxfp8", "cache_weights": True}, "computed"),
    ],
)
def test_only_what_was_simulated_says_so(words, how):
    (line,) = lines_of(cell(**words))
    assert f"; {how}: " in line


@pytest.mark.parametrize(
    ("words", "copies"),
    [
        ({"mode": "bf16"}, 0),
        ({"mode": "mxfp8"}, 2),
        ({"mode": "mxfp8", "gemms": "all"}, 4),  # along two axes
        ({"mode": "hifp8", "gemms": "all"}, 2),  # element by element: one for both
        ({"recipe": "nvfp4"}, 2),  # in squares
        ({"recipe": "mxfp4-backward"}, 4),  # of dgrad alone, in fp32 under its gain
    ],
)
def test_cached_weights_are_counted_as_they_are_kept(words, copies):
    words = {"mode": "bf16", "flags": "--tensor-model-parallel-size 2"} | words
    needs = []
    for keeps in (False, True):
        made = cell(**words, cache_weights=keeps)
        lines = lines_of(made)
        needs.append(float(re.search(r"computed: ([\d.]+) of", lines[0])[1]))
    weights = rank_weights(made.experiment.model, Layout(8, tensor=2), 0).linear
    assert needs[1] - needs[0] == pytest.approx(copies * weights / GIB, abs=0.11)


# -- what is chosen --------------------------------------------------------------------------------

# Of all types, a mode each; of those with scripts, all modes.
MODES = [q.name for q in tables.modes().values() if q.scripts or q.name in tables.quant_types()]
CELLS = [(m, q, n) for m in tables.script_models() for q in MODES for n in (8, 64)]


@pytest.mark.parametrize(("model", "mode", "gpus"), CELLS)
def test_a_plan_fits_and_divides(model, mode, gpus):
    made = cell(model, mode, gpus)
    layout = planned(made)
    check_layout(made.with_layout(layout.flags()))
    assert need(made, layout) <= LIMIT
    assert layout.data * layout.tensor * layout.pipeline == gpus
    assert 128 % layout.data == 0
    shape = made.experiment.model
    assert shape.num_attention_heads % layout.tensor == 0
    assert (shape.num_query_groups or 1) % layout.tensor == 0 or shape.mla
    assert shape.num_layers % layout.pipeline == 0
    assert shape.moe is None or shape.moe.num_experts % layout.expert == 0
    assert layout.recompute == "none"


@pytest.mark.parametrize(
    ("mode", "layout"),
    [
        ("linear_mxfp8", Layout(8, tensor=2)),
        ("linear_hif4", Layout(8, pipeline=2)),
        ("FA_hif4", Layout(8, tensor=2)),
        ("linear_fp8_tensor_e4m3", Layout(8, tensor=2)),
    ],
)
def test_ranks_cut_no_block_of_the_linear_layers_type(mode, layout):
    """Of half of 12,736 elements, blocks of 32 are whole, and those of 64 are not."""
    assert planned(cell(mode=mode, flags="--ffn-hidden-size 12736")) == layout


@pytest.mark.parametrize("mode", MODES)
def test_a_width_that_is_no_multiple_of_a_block_is_fine_on_one_tensor_rank(mode):
    made = cell("llama32-1b", mode, flags="--ffn-hidden-size 8200")
    assert planned(made).tensor == 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", tables.DTYPES)
def test_each_dtype_has_a_layout_on_each_device(device, dtype):
    made = cell("llama31-8b", gpus=8, dtype=dtype)
    used = need(made, planned(made, imagined(device, 8)))
    assert used <= usable(DEVICES[device].memory)
    # Two bytes of a weight more, four of a state less, and twice the activations.
    assert used > need(made, Layout(8, tensor=8, recompute="full"))


def test_parameters_are_gathered_behind_computation_but_in_fp16():
    """Upstream ends an evaluation before the first step that fp16's loss scale lets through."""
    flags = {d: set(plan_of(cell(dtype=d))[0].placement.layout) for d in tables.DTYPES}
    assert flags["bf16"] >= EVERY
    assert flags["fp32"] >= EVERY
    assert EVERY - flags["fp16"] == {"--overlap-param-gather"}


def test_eight_billion_weights_do_not_fit_one_gpu_each():
    assert need(cell(), Layout(8)) > LIMIT
    assert planned(cell()) == Layout(8, tensor=2)
    assert planned(cell(), imagined("b200", 8)) == Layout(8)


def test_what_the_users_flags_say_counts():
    assert planned(cell(flags="--exit-interval 100 --lr 1e-5")) == planned(cell())
    assert planned(cell(flags="--num-layers 2")) == Layout(8)
    assert planned(cell(flags="--micro-batch-size 4")).tensor > 2
    assert planned(cell(flags="--seq-length 2048")) == Layout(8)
    assert planned(cell(flags="--global-batch-size 4", gpus=8)).data <= 4
    assert planned(cell("llama32-1b", flags="--attention-backend unfused")).recompute == "core_attn"
    assert planned(cell("llama32-1b", flags="--attention-backend=unfused")).recompute == "core_attn"
    scheduled = ("pv: mxfp4 until 0.5, then none",)
    for flags, again in (("", "none"), ("--attention-dropout 0.1", "core_attn")):
        made = cell("llama32-1b", schedule=scheduled, flags=flags)
        assert planned(made).recompute == again


@pytest.mark.parametrize(
    ("mode", "flags", "again"),
    [
        ("bf16", "--reset-attention-mask", "core_attn"),
        ("pv_nvfp4", "--reset-attention-mask", "core_attn"),
        ("pv_mxfp8", "--reset-attention-mask", "none"),
        ("pv_mxfp8", "--window-size 128,0", "core_attn"),
        ("bf16", "--softmax-type learnable", "core_attn"),
        ("pv_mxfp8", "--attention-dropout 0.00", "none"),
        ("bf16", "--attention-dropout 0.1", "none"),
        ("pv_mxfp8", "--attention-dropout much", "none"),
    ],
)
def test_what_keeps_the_scores_is_counted(mode, flags, again):
    assert planned(cell("llama32-1b", mode, flags=flags)).recompute == again


def test_a_source_without_the_branch_keeps_the_scores():
    made = cell("llama32-1b", "pv_mxfp8", without=("fused_attention",))
    assert planned(made).recompute == "core_attn"


def test_rounded_weights_that_stay_are_counted():
    made = cell(mode="mxfp8", gemms="all")
    kept = cell(mode="mxfp8", gemms="all", cache_weights=True)
    assert planned(made).tensor == 2
    assert planned(kept).tensor == 4


def test_the_types_in_the_tree_decide_where_no_mode_does(tmp_path):
    made = cell("llama32-1b", "source", flags="--attention-dropout 0.1")
    chosen = [
        plan_layout(tmp_path, made, H100, {"pv": kind})[0].placement.layout
        for kind in ("none", "hifp8")
    ]
    assert [layout_of(flags, 8).recompute for flags in chosen] == ["none", "core_attn"]


@pytest.mark.parametrize(
    ("made", "machine"),
    [
        (cell(), Machine(8, 0)),
        (cell(training="smoke", gpus=1), H100),
        (cell(training="tiny", gpus=1), H100),
        (cell(training="study", gpus=1), H100),
    ],
)
def test_on_a_cpu_and_for_small_models_nothing_is_planned(made, machine):
    assert plan_of(made, machine) == (made, ())
    assert not decides(made.experiment, machine)


def test_a_plan_of_an_earlier_start_is_made_anew():
    made = cell().with_layout(Layout(8, tensor=8).flags())
    assert planned(made) == Layout(8, tensor=2)


def test_what_fits_nowhere_is_refused_with_what_helps():
    with pytest.raises(LayoutError, match=r"deepseek2_lite in mode bf16 .*2 GPUs of .*`--`"):
        lines_of(cell("deepseek2_lite", "bf16", 2))


def test_processes_that_divide_in_no_layout_are_refused_by_what_is_wrong():
    made = cell("llama32-1b", gpus=6)
    check_config(
        made.changed("experiment", training=SMALL).model_copy(update={"placement": Placement()}),
        Machine(1, 0),
    )
    with pytest.raises(LayoutError, match=r"128 sequences .*6"):
        lines_of(made)


SMALL = tables.trainings()["smoke"]


def test_a_distillation_says_that_the_teacher_is_not_counted(tmp_path):
    (line,) = lines_of(cell("llama32-1b", teacher=tmp_path))
    assert "teacher's memory is not counted" in line


# -- HybridModels ----------------------------------------------------------------------------------


@pytest.mark.parametrize("gpus", [8, 64])
@pytest.mark.parametrize("mode", ["bf16", "FA_linear_mxfp8"])
@pytest.mark.parametrize("model", tables.script_models())
def test_a_hybrid_model_of_a_gpts_layers_has_its_layout_and_its_memory(model, mode, gpus):
    lines = []
    for model_class in ("gpt", "hybrid"):
        made = cell(model, mode, gpus, model_class=model_class)
        lines.append(lines_of(made))
    assert lines[0] == lines[1]
    assert "; simulated: " in lines[0][0]


def test_the_planner_takes_the_stages_of_a_pattern():
    pattern = "|".join(["*-*-*-"] * 4 + ["*-*-"] * 10)
    made = cell(flags=f"--hybrid-layer-pattern {pattern}", dtype="fp32")
    chosen = planned(made)
    assert chosen.pipeline == 1  # 14 stages on 8 GPUs
    assert chosen.tensor > 1
    uneven = cell(flags=f"--hybrid-layer-pattern {'*-' * 16}|{'*-' * 13}", mode="linear_hif4")
    uneven = uneven.changed("experiment", model=uneven.experiment.model.model_copy(update=WIDE))
    assert planned(uneven) == Layout(8, pipeline=2)
    odd = uneven.experiment.model.model_copy(update={"pattern": "*-" * 29})
    assert planned(uneven.changed("experiment", model=odd)).pipeline == 1


WIDE = {"ffn_hidden_size": 12736}  # half of it has no whole blocks of 64


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("*-*-*-*-", "as given: PP 2, .*computed: "),
        ("*-**--|-*-*-", "as given: PP 2, .*computed: "),
        ("*-|*-|*-|*-", "not known, since --hybrid-layer-pattern with several segments"),
    ],
)
def test_a_pattern_in_given_stages_has_a_memory_unless_they_are_interleaved(pattern, text):
    flags = f"--hybrid-layer-pattern {pattern} --pipeline-model-parallel-size 2"
    made = cell("llama32-1b", flags=flags)
    (line,) = lines_of(made)
    assert re.search(text, line)


def test_a_pattern_that_the_given_stages_cannot_share_is_refused():
    flags = "--hybrid-layer-pattern *-*-*- --pipeline-model-parallel-size 2"
    made = cell("llama32-1b", flags=flags)
    with pytest.raises(MqoError, match="3 blocks, which 2 pipeline stages"):
        lines_of(made)


# -- a layout of the user's own --------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [
        "--tensor-model-parallel-size 4",
        "--tensor-model-parallel-size=4 --sequence-parallel",
        "--use-distributed-optimizer",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--context-parallel-size 2",
        "--overlap-grad-reduce",
        "--use-torch-fsdp2",
        "--num-layers-per-virtual-pipeline-stage 1 --pipeline-model-parallel-size 2",
    ],
)
def test_a_layout_of_the_users_is_left_as_it_is(flags):
    made = cell(flags=flags)
    assert not decides(made.experiment, H100)
    assert plan_of(made)[0] == made


def test_a_layout_that_is_too_large_is_warned_of_with_the_numbers():
    made = cell(flags="--tensor-model-parallel-size 1 --lr 1e-5")
    first, second = lines_of(made)
    alone = Layout(8, sharded=False, overlap=False)
    assert need(made, alone) > 134 * GIB
    assert f"computed: {need(made, alone) / GIB:.1f} of {LIMIT / GIB:.1f} GiB" in first
    flags = second.partition("GiB: ")[2].split()
    assert layout_of(flags, 8) == Layout(8, tensor=2)
    assert f"{need(made, Layout(8, tensor=2)) / GIB:.1f} GiB" in second


def test_a_layout_that_fits_is_said_with_its_memory():
    flags = "--use-distributed-optimizer --tensor-model-parallel-size 4 --sequence-parallel"
    made = cell(flags=flags)
    (line,) = lines_of(made)
    layout = Layout(8, tensor=4, overlap=False)
    assert "warning" not in line
    assert f"{need(made, layout) / GIB:.1f} of" in line


def test_a_layout_that_cannot_start_is_refused():
    made = cell(flags="--tensor-model-parallel-size 3")
    with pytest.raises(LayoutError, match="tensor 3"):
        check_config(made, H100)


def test_flags_that_the_formulas_do_not_know_are_named():
    made = cell("llama32-1b", flags="--num-experts 8")
    (line,) = lines_of(made)
    assert "--num-experts" in line
    assert not decides(made.experiment, H100)


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ((), f"{Layout(8, sharded=False)}: "),
        (Layout(8, tensor=2).flags(), "as given; "),
    ],
)
def test_without_a_plan_the_layout_that_a_run_has_is_said(own, said):
    flags = " ".join(("--transformer-impl transformer_engine", *own))
    made = cell(mode="linear_mxfp8", flags=flags)
    (line,) = lines_of(made)
    assert line.startswith(said) and "--transformer-impl" in line


@pytest.mark.parametrize(
    "layout",
    [
        Layout(8),
        Layout(8, tensor=2, pipeline=2, context=2, recompute="full", reshardable=True),
        Layout(64, expert=4, recompute="core_attn", sharded=False, bucket=64_000_000),
        Layout(8, sharded=False, overlap=False),
    ],
)
def test_flags_say_the_layout_that_they_were_made_of(layout):
    assert layout_of(layout.flags(), layout.gpus) == layout


# -- going on from a checkpoint --------------------------------------------------------------------

ARGS = {
    "world_size": 8,
    "data_parallel_size": 4,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "context_parallel_size": 1,
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "ddp_bucket_size": None,
    "dist_ckpt_optim_fully_reshardable": False,
}


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """A function that makes a folder of a checkpoint, written with such arguments."""

    def make(tracker="1000", **args):
        (tmp_path / TRACKER).write_text(tracker)
        monkeypatch.setattr(plan, "checkpoint_arguments", lambda tree, folder: ARGS | args)
        return tmp_path

    return make


def resumed(folder, **rest):
    made = cell(checkpoint=folder, **rest)
    gpus = made.placement.cluster.processes
    return layout_of(
        plan_layout(folder, made, H100, made.quantization.types)[0].placement.layout, gpus
    )


def test_a_resumed_run_keeps_the_layout_of_its_checkpoint(saved):
    four = saved(tensor_model_parallel_size=4, data_parallel_size=2)
    assert resumed(four) == Layout(8, tensor=4)
    assert resumed(four, gpus=64) == Layout(64, tensor=4)
    assert resumed(four, mode="mxfp8") == Layout(8, tensor=4)
    unfused = resumed(four, mode="mxfp8", flags="--attention-backend unfused")
    assert unfused == Layout(8, tensor=4, recompute="core_attn")
    assert resumed(saved(dist_ckpt_optim_fully_reshardable=True)).reshardable


def test_a_resumed_run_keeps_its_kind_of_optimizer(saved):
    plain = {"use_distributed_optimizer": False, "overlap_grad_reduce": False}
    folder = saved(tensor_model_parallel_size=4, data_parallel_size=2, **plain)
    assert resumed(folder) == Layout(8, tensor=4, sharded=False, overlap=False)
    assert not EVERY & set(
        plan_layout(folder, cell(checkpoint=folder), H100, {})[0].placement.layout
    )
    bare = resumed(saved(overlap_grad_reduce=False), model="llama32-1b")
    assert (bare.sharded, bare.overlap) == (True, False)


def test_a_resumed_run_keeps_its_buckets_on_more_ranks(saved):
    """Upstream's default grows with the ranks, and its optimizer is stored by buckets."""
    many = saved(data_parallel_size=48, world_size=96)
    assert resumed(many, gpus=64).bucket == 48_000_000
    assert resumed(saved(data_parallel_size=32), gpus=64).bucket == BUCKET
    assert resumed(saved(ddp_bucket_size=7), gpus=64).bucket == 7


def test_a_checkpoints_layout_that_no_longer_fits_is_refused_with_what_it_is(saved):
    folder = saved(tensor_model_parallel_size=1, use_distributed_optimizer=False)
    with pytest.raises(LayoutError, match=rf"\({Layout(8, sharded=False)}\)"):
        resumed(folder)
    with pytest.raises(LayoutError, match=r"4 .*tensor 8"):
        resumed(saved(tensor_model_parallel_size=8), gpus=4)


@pytest.mark.parametrize(
    ("flags", "tracker", "args"),
    [
        ("--no-load-optim", "1000", {}),
        ("--finetune", "1000", {}),
        ("", "release", {}),
        ("", "1000", {"no_save_optim": True}),
    ],
)
def test_weights_alone_may_have_any_layout(saved, flags, tracker, args):
    folder = saved(tracker, tensor_model_parallel_size=8, **args)
    assert resumed(folder, flags=flags) == Layout(8, tensor=2)


def test_a_folder_without_a_checkpoint_begins_anew(tmp_path):
    assert saved_layout(tmp_path, cell(checkpoint=tmp_path).experiment) is None
    assert saved_layout(tmp_path, cell().experiment) is None


def test_the_users_own_load_is_what_is_gone_on_from(saved):
    folder = saved(tensor_model_parallel_size=4)
    made = cell(flags=f"--load {folder}", checkpoint=folder / "elsewhere")
    assert saved_layout(folder, made.experiment) == Layout(8, tensor=4)


def test_a_checkpoint_that_does_not_say_its_layout_is_an_error(saved, monkeypatch):
    folder = saved()

    def fails(tree, place):
        raise ConvertError("damaged")

    monkeypatch.setattr(plan, "checkpoint_arguments", fails)
    with pytest.raises(CheckpointError, match=rf"{folder} .*: damaged\..*`--`"):
        resumed(folder)
    made = cell(checkpoint=folder, flags="--use-distributed-optimizer")
    assert plan_layout(folder, made, H100, made.quantization.types)[0].placement.layout == ()


def test_an_older_checkpoint_says_the_layout_where_the_newest_is_damaged(saved, monkeypatch):
    folder = saved("")  # as a kill may leave it
    whole, half = folder / "iter_0001000", folder / "iter_0002000"
    for one in (whole, half):
        one.mkdir()

    def describe(tree, place):
        if place != whole.resolve():
            raise ConvertError("damaged")
        return ARGS | {"tensor_model_parallel_size": 4}

    monkeypatch.setattr(plan, "checkpoint_arguments", describe)
    assert resumed(folder) == Layout(8, tensor=4)


# -- processes and devices -------------------------------------------------------------------------


def processes(*words, machine=H100):
    args = of_script(NAMES[0], *words)
    return arguments.config_from(args, [], machine).placement.cluster.nproc_per_node


def test_a_real_configuration_takes_all_gpus_and_a_small_one_takes_one():
    assert processes() == processes("--training-config", "fast") == 8
    assert processes("--nproc-per-node", "2") == 2
    assert processes("--training-config", "smoke") == processes("--training-config", "tiny") == 1
    assert processes(machine=Machine(16, 0)) == 1


def test_a_device_is_for_dry_runs_and_an_unknown_one_lists_the_valid_ones():
    with pytest.raises(MqoError, match=r"--device .*--dry-run"):
        arguments.machine_of(of_script(NAMES[0], "--device", "h100-80gb"))
    made = arguments.machine_of(of_script(NAMES[0], "--device", "h200", "--dry-run"))
    assert (made.gpus, made.memory) == (8, DEVICES["h200"].memory)
    with pytest.raises(UnknownNameError, match=", ".join(sorted(DEVICES))):
        arguments.machine_of(of_script(NAMES[0], "--device", "h1000", "--dry-run"))
