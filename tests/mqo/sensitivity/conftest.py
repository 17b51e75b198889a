"""A measured sensitivity, as the program gives it."""

import pytest

WEIGHTS = {"decoder.layers.0.*": 300, "decoder.layers.1.*": 300, "output_layer": 400}


def change(name, gradient, loss=0.0, layers=(), weights=None):
    size = WEIGHTS.get(name, 0) if weights is None else weights
    return {
        "name": name,
        "layers": list(layers),
        "weights": size,
        "loss": loss,
        "loss_error": 0.001,
        "gradient": gradient,
    }


@pytest.fixture
def facts():
    """What the program writes for blocks."""
    return {
        "loss": 7.5,
        "tokens": 4096,
        "window": 64,
        "text": ["a text"],
        "iteration": 8,
        "dtype": "float32",
        "modelopt": None,
        "seconds": 1.0,
        "everything": change("everything", 0.3, 0.03, weights=1000),
        "changes": [
            change("decoder.layers.0.*", 0.05, 0.02),
            change("decoder.layers.1.*", 0.06, -0.01),
            change("output_layer", 0.2, 0.01),
        ],
    }
