"""One step: gradients from autograd's hooks to the optimizers' step."""
