"""What the stubs have in common."""


def cuda_only(name):
    """Return a class that stands for `name`; using it raises, as without a CUDA tensor."""

    def refuse(*args, **kwargs):
        raise RuntimeError(f"{name} has kernels for CUDA only")

    return type(name, (), {"__init__": refuse, "apply": staticmethod(refuse)})
