from __future__ import annotations

import pytest
import torch

from hocket.task.models import MLP, NAMES, ResNet20, SmallCNN, build


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32)])
def test_every_network_maps_images_to_logits_and_reaches_every_parameter(
    name: str, shape: tuple[int, int, int]
) -> None:
    model = build(name, shape, classes=7)

    output = model(torch.randn(5, *shape))
    output.square().sum().backward()

    assert output.shape == (5, 7)
    assert output.dtype == torch.float32
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


def test_resnet20_has_the_papers_parameters_and_layers() -> None:
    """0.27 M (He et al. 2016, table 6): convolutions, two per channel of a batch norm, the classifier."""
    convolutions = 9 * (3 * 16 + 6 * 16 * 16 + 16 * 32 + 5 * 32 * 32 + 32 * 64 + 5 * 64 * 64)
    batch_norms = 2 * (7 * 16 + 6 * 32 + 6 * 64)
    model = ResNet20(in_channels=3, classes=10)

    assert count(model) == convolutions + batch_norms + 64 * 10 + 10 == 269_722
    weighted = [part for part in model.modules() if isinstance(part, (torch.nn.Conv2d, torch.nn.Linear))]
    assert len(weighted) == 20


def test_resnet20_block_that_halves_keeps_every_second_pixel_where_its_residual_is_zero() -> None:
    block = ResNet20(in_channels=3, classes=10)[6]
    torch.nn.init.zeros_([*block.get_submodule("residual").children()][-1].get_parameter("weight"))
    x = torch.rand(2, 16, 7, 7)

    output = block(x)

    assert output.shape == (2, 32, 4, 4)
    assert torch.equal(output[:, :16], x[:, :, ::2, ::2])
    assert not output[:, 16:].any()


def test_mlp_has_a_layer_per_entry() -> None:
    assert count(MLP(64, (128,), 10)) == 64 * 128 + 128 + 128 * 10 + 10
    assert count(MLP(64, (), 10)) == 64 * 10 + 10
    assert MLP(4, (3, 2), 5)(torch.zeros(6, 2, 2)).shape == (6, 5)


def test_cnn_is_small() -> None:
    assert count(SmallCNN(in_channels=1, image_size=28, classes=10)) == 105_866


def test_initialisation_comes_from_the_global_generator() -> None:
    def weights(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return torch.nn.utils.parameters_to_vector(build("resnet20", (1, 8, 8), 10).parameters())

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(
        ValueError, match=r"'resnet2'\. Did you mean 'resnet20'\? Allowed: mlp, cnn, resnet20"
    ):
        build("resnet2", (1, 8, 8), 10)


def test_cnn_refuses_images_that_it_cannot_halve_twice() -> None:
    with pytest.raises(ValueError, match="square images, not 8 x 9"):
        build("cnn", (1, 8, 9), 10)
    with pytest.raises(ValueError, match="image_size is 3; allowed: 4 or more"):
        build("cnn", (1, 3, 3), 10)
