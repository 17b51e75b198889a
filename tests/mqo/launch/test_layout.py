import pytest
from mqo.errors import LayoutError
from mqo.launch.config import Cluster, resolve
from mqo.launch.layout import check_layout
from mqo.launch.prepare import check_config

TP, PP, CP = (f"--{kind}-parallel-size" for kind in ("tensor-model", "pipeline-model", "context"))
ODD = "--num-attention-heads 12 --num-query-groups 6 --kv-channels 64"
EP, ETP = "--expert-model-parallel-size", "--expert-tensor-parallel-size"


def cell(text="", processes=4, model="llama32-1b", **cluster):
    """A smoke cell: 4 heads in 1 group, 256 tokens, one micro-batch of 4 sequences a step."""
    where = Cluster(nproc_per_node=processes, **cluster)
    return resolve(
        model, "wikipedia", "bf16", "smoke", extra_flags=tuple(text.split()), cluster=where
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
        (f"{TP} 2 {PP} 2", 6, "6 processes do not fit tensor 2 x pipeline 2 x context 1 = 4"),
        (f"{CP} 8", 4, "4 processes do not fit tensor 1 x pipeline 1 x context 8"),
        (f"{TP} 3", 3, "attention heads cannot be shared out by tensor 3"),
        (f"{TP} 4 {ODD}", 4, "6 query groups and tensor 4: neither"),
        (f"{TP} 2 --ffn-hidden-size 1025", 2, "1025 MLP channels"),
        (f"{CP} 2 --seq-length 66", 2, "66 tokens cannot be shared out by 2 x context 4"),
        (f"{TP} 4 --sequence-parallel --seq-length 66", 4, "66 tokens cannot be shared out by co"),
        ("--micro-batch-size 4", 2, "4 sequences cannot be shared out by micro-batch x data-par"),
        ("--num-attention-heads 6 --num-query-groups 6", 1, "256 channels of a layer cannot be"),
        ("--num-attention-heads 8 --num-query-groups 3", 1, "8 attention heads cannot be shared"),
        ("--num-attention-heads 0", 1, "0 attention heads, 2 query groups"),
        ("--seq-length 512", 1, "512 tokens, and the model has 256 positions"),
        (f"{TP} 0", 1, "A parallel size is below 1"),
        (f"{TP} two", 1, "invalid int value: 'two'"),
    ],
)
def test_one_that_does_not_is_refused_in_one_line(text, processes, said):
    with pytest.raises(LayoutError) as caught:
        check_config(cell(text, processes))
    assert said in str(caught.value)
    assert "Expected: " in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{EP} 8 --micro-batch-size 1", "4 processes do not fit expert 8 x expert-tensor 1"),
        (f"{EP} 4 --num-experts 6 --micro-batch-size 1", "6 experts cannot be shared out by exp"),
        (
            f"{TP} 4 {ETP} 4 --moe-ffn-hidden-size 90 --num-attention-heads 4",
            "90 expert channels cannot be shared out by expert-tensor 4",
        ),
    ],
)
def test_experts_that_do_not_fit(text, said):
    with pytest.raises(LayoutError, match=said):
        check_layout(cell(text, 4, "deepseek2_lite"))


def test_the_processes_of_all_nodes_count():
    check_layout(cell(f"{TP} 4", 2, nnodes=2))
    with pytest.raises(LayoutError, match="2 processes do not fit"):
        check_layout(cell(f"{TP} 4", 1, nnodes=2))
