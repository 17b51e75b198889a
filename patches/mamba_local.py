"""Let Mamba's mixer run without mamba_ssm, and without CUDA.

If that package does not import, upstream replaces its functions by mocks and refuses to build a
mixer. Here functions in torch replace them, also on a machine without CUDA, which the kernels need.
"""

from mqo.overlay.edits import AddImport, Anchor, FileEdits, InsertBefore

CHOICE = """
if kernels.are_needed(HAVE_MAMBA_SSM):
    causal_conv1d_fn = kernels.causal_conv1d_fn
    mamba_chunk_scan_combined = kernels.mamba_chunk_scan_combined
    mamba_split_conv1d_scan_combined = kernels.mamba_split_conv1d_scan_combined
    HAVE_MAMBA_SSM, RMSNormGated = True, kernels.RMSNorm
"""

FILES = (
    FileEdits(
        "megatron/core/ssm/mamba_mixer.py",
        (
            AddImport("from mqo.megatron.mamba import kernels"),
            # The first of the two, which makes the mocks; the other one refuses.
            InsertBefore("", (Anchor("not HAVE_MAMBA_SSM", 2),), CHOICE.lstrip()),
        ),
    ),
)
