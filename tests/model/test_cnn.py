"""Convolutional networks against the published numbers of parameters and multiply-adds, and against torch."""

import pytest

import simpar
from simpar.errors import ModelError
from simpar.model.cnn import CNN_NAMES, Conv, cnn

# parameters: torchvision 0.20, model pages (Inception v3 without its auxiliary classifier); multiply-adds: same pages
PUBLISHED = {
    "alexnet": (61_100_840, 0.71e9),
    "inception-v3": (23_834_568, 5.71e9),
    "resnet-50": (25_557_032, 4.09e9),
    "resnet-152": (60_192_808, 11.51e9),
    "vgg-16": (138_357_544, 15.47e9),
}


@pytest.mark.parametrize("name", CNN_NAMES)
def test_sizes_are_as_published(name):
    model = cnn(name)
    parameters, macs = PUBLISHED[name]
    assert model.parameters == model.trainable_parameters == parameters
    # forward, gradients of inputs and of filters do as much each
    assert model.step_flop(2) == pytest.approx(2 * 3 * 2 * macs, rel=0.008)


def test_a_convolution_does_what_torch_counts():
    torch = pytest.importorskip("torch", reason="counting needs torch")
    flop_counter = pytest.importorskip("torch.utils.flop_counter", reason="counting needs torch")
    conv = Conv(positions=14 * 14, inputs=32, outputs=48, area=9, extra=1)
    module = torch.nn.Conv2d(32, 48, 3, padding=1)
    with flop_counter.FlopCounterMode(display=False) as counter:
        module(torch.zeros(1, 32, 14, 14))
    assert counter.get_total_flops() == 2 * conv.macs
    assert sum(p.numel() for p in module.parameters()) == conv.parameters


def test_a_job_names_one():
    result = simpar.simulate(
        simpar.Job(model="cnn:resnet-50", cluster="v100-sxm-16gb:1x2", plan={"micro_batch": 32, "optimizer": "sgd"})
    )
    assert result.unit == "samples"
    assert result.communication_bytes["dp"] == pytest.approx(4 * 25_557_032, rel=1e-3)


def test_an_unknown_one_names_the_nearest():
    with pytest.raises(ModelError, match="cnn 'resnet50' is unknown; did you mean 'resnet-50'"):
        cnn("resnet50")
