"""A short training of a small model, for the tests of the examples."""

import torch


def losses_of(model, x, steps, lr=1e-2, before=lambda step: None):
    """The losses of an autoencoder in `steps` steps of Adam, whose gradients are all finite."""
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=lr), []
    for step in range(steps):
        before(step)
        loss = (model(x) - x).square().mean()
        loss.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
