import pytest
from mqo.errors import LayoutError
from mqo.launch.config import Cluster, resolve
from mqo.launch.layout import check_layout
from mqo.launch.prepare import check_config

TP, PP, CP = (f"--{kind}-parallel-size" for kind in ("tensor-model", "pipeline-model", "context"))
ODD = "--num-attention-heads 12 --num-query-groups 6 --kv-channels 64"
EP, ETP = "--expert-model-parallel-size", "--expert-tensor-parallel-size"


def cell(text="", processes=4, model="llama32-1b", shrink=None, **cluster):
    """A smoke cell: 4 heads in 1 group, 256 tokens, one micro-batch of 4 sequences a step."""
    where = Cluster(nproc_per_node=processes, **cluster)
    return resolve(
        *(model, "wikipedia", "bf16", "smoke"),
        extra_flags=tuple(text.split()),
        cluster=where,
        shrink=shrink,
    )


@pytest.mark.parametrize(
    ("text", "processes"),
    [
        ("", 1),
        ("--micro-batch-size 1", 4),
        (f"{TP} 4 --sequence-parallel", 4),
        (f"{TP} 2 {PP} 2", 4),
        (f"{CP} 2", 2),
        (f"{TP}=2 {CP} 2", 4),
        (f"{TP} 3 {TP} 2", 2),
    ],
)
def test_a_layout_that_fits(text, processes):
    check_layout(cell(text, processes))


def test_experts_that_fit():
    experts = f"{EP} 2 --micro-batch-size 1"
    check_layout(cell(experts, 4, "deepseek2_lite"))
    check_layout(cell(f"{experts} {TP} 2 {ETP} 1", 4, "deepseek2_lite"))


@pytest.mark.parametrize(
    ("text", "processes", "said"),
    [
        (f"{TP} 2 {PP} 2", 6, "6 .*tensor 2 x pipeline 2 x context 1 = 4"),
        (f"{CP} 8", 4, "4 .*tensor 1 x pipeline 1 x context 8"),
        (f"{TP} 3", 3, "attention heads .*tensor 3"),
        (f"{TP} 4 {ODD}", 4, "6 query groups .*tensor 4"),
        (f"{TP} 2 --ffn-hidden-size 1025", 2, "1025 MLP channels .*tensor 2"),
        (f"{CP} 2 --seq-length 66", 2, "66 tokens .*2 x context 4"),
        (f"{TP} 4 --sequence-parallel --seq-length 66", 4, "66 tokens .*context x tensor 4"),
        ("--micro-batch-size 4", 2, "4 sequences .*micro-batch x data-parallel ranks 8"),
        ("--num-attention-heads 6 --num-query-groups 6", 1, "256 channels .*heads 6"),
        ("--num-attention-heads 8 --num-query-groups 3", 1, "8 attention heads .*query groups 3"),
        ("--num-attention-heads 0", 1, "0 attention heads .*2 query groups"),
        ("--seq-length 512", 1, "512 tokens.*256 positions"),
        (f"{TP} 0", 1, r"--\*-parallel-size"),
        (f"{TP} two", 1, f"{TP}: .*'two'"),
    ],
)
def test_one_that_does_not_is_refused_in_one_line(text, processes, said):
    with pytest.raises(LayoutError, match=said) as caught:
        check_config(cell(text, processes))
    assert caught.value.expected
    assert "\n" not in str(caught.value)


MAMBA = """train_sequence = 256
pattern = "M-*-"
hidden_size = 64
ffn_hidden_size = 128
num_attention_heads = 8
num_query_groups = 8
vocab_size = 512
tied_embeddings = true
norm_epsilon = 1e-5
rotary_base = 10000
[mamba]
num_heads = 12
head_dim = 8
num_groups = 4
state_dim = 16
"""


@pytest.mark.parametrize(
    ("text", "processes", "said"),
    [
        (f"{TP} 2", 4, ""),
        (f"{TP} 2 {CP} 2", 4, ""),
        (f"{TP} 8", 8, "4 groups of Mamba heads .*tensor 8"),
        (f"{TP} 2 {CP} 4", 8, "12 Mamba heads .*tensor x context 8"),
        (f"{CP} 6 --seq-length 192", 6, "4 groups of Mamba heads .*tensor x context 6"),
    ],
)
def test_ranks_share_heads_and_groups_of_mamba_layers(tmp_path, text, processes, said):
    file = tmp_path / "mine.toml"
    file.write_text(MAMBA)
    config = cell(f"--global-batch-size 32 {text}", processes, str(file), shrink=(1, 1))
    if not said:
        check_layout(config)
        return
    with pytest.raises(LayoutError, match=said):
        check_layout(config)


def test_the_whole_text_of_a_size_that_does_not_fit():
    with pytest.raises(LayoutError) as caught:
        check_config(cell(f"{TP} 2 --ffn-hidden-size 1025", 2))
    assert str(caught.value) == (
        f"1025 MLP channels cannot be divided by tensor 2. Expected: a multiple of 2. Change {TP}."
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{EP} 8 --micro-batch-size 1", "4 .*expert 8 x expert-tensor 1"),
        (f"{EP} 4 --num-experts 6 --micro-batch-size 1", "6 experts .*expert 4"),
        (
            f"{TP} 4 {ETP} 4 --moe-ffn-hidden-size 90 --num-attention-heads 4",
            "90 expert channels .*expert-tensor 4",
        ),
    ],
)
def test_experts_that_do_not_fit(text, said):
    with pytest.raises(LayoutError, match=said):
        check_layout(cell(text, 4, "deepseek2_lite"))


def test_the_processes_of_all_nodes_count():
    check_layout(cell(f"{TP} 4", 2, nnodes=2))
    with pytest.raises(LayoutError, match=r"2 .*tensor 4"):
        check_layout(cell(f"{TP} 4", 1, nnodes=2))


def test_a_distillation_of_a_hybrid_model_has_one_pipeline_stage(tmp_path):
    def hybrid(flag):
        own = {"model_class": "hybrid", "teacher": tmp_path, "extra_flags": (flag, "2")}
        where = Cluster(nproc_per_node=2)
        return resolve("llama32-1b", "wikipedia", "bf16", "smoke", cluster=where, **own)

    check_layout(hybrid(TP))
    with pytest.raises(LayoutError, match="distillation"):
        check_layout(hybrid(PP))
