"""Known models have the gradients that they have, and buckets hide what they can."""

from math import isclose

import pytest

from mpiring.algorithms.registry import find
from mpiring.analysis.buckets import ALONE, Exposure, curve, exposed, sizes, timer
from mpiring.analysis.gradients import Gradient, known, load
from mpiring.analysis.machines import find_machine


@pytest.mark.parametrize("name, tensors, count, first, last", [
    ("resnet50", 161, 25_557_032, "fc.bias", "conv1.weight"),
    ("bert-base", 199, 109_482_240, "pooler.dense.bias", "embeddings.word_embeddings.weight")])
def test_models(name, tensors, count, first, last):
    model = load(name)
    assert len(model.gradients) == len({gradient.name for gradient in model.gradients}) == tensors
    assert sum(gradient.count for gradient in model.gradients) == count and model.nbytes == 4 * count
    assert (model.gradients[0].name, model.gradients[-1].name) == (first, last)
    assert all(gradient.count > 0 and gradient.seconds > 0 for gradient in model.gradients)
    assert isclose(model.seconds, {"resnet50": 112 / 367 * 2 / 3, "bert-base": 32 / (744.48 / 8) * 2 / 3}[name], rel_tol=1e-3)
    assert model.source and model.device and model.batch


def test_shapes_of_resnet50():
    found = {gradient.name: gradient.count for gradient in load("resnet50").gradients}
    assert found["conv1.weight"] == 64 * 3 * 7 * 7 and found["fc.weight"] == 1000 * 2048
    assert found["layer4.0.conv2.weight"] == 512 * 512 * 9 and found["layer3.0.downsample.0.weight"] == 1024 * 512
    assert sum(count for name, count in found.items() if "bn" in name or "downsample.1" in name) == 53_120


def test_a_name_that_is_not_known():
    assert known() == ["bert-base", "resnet50"]
    with pytest.raises(ValueError, match=r"unknown model 'resnet-50' \(did you mean 'resnet50'\?\); known: bert-base, resnet50"):
        load("resnet-50")


FOUR = [Gradient(str(number), 250, 1.0) for number in range(4)]


def test_closed_cases():
    assert exposed(FOUR, ALONE, lambda nbytes: 0.5) == Exposure(4.5, 4.0, 2.0, 0.5, 4)
    assert exposed(FOUR, ALONE, lambda nbytes: 2.0) == Exposure(9.0, 4.0, 8.0, 5.0, 4)      # one waits for the other
    assert exposed(FOUR, 2000, lambda nbytes: nbytes / 1000) == Exposure(6.0, 4.0, 4.0, 2.0, 2)
    assert exposed(FOUR, 4000, lambda nbytes: nbytes / 1000) == Exposure(8.0, 4.0, 4.0, 4.0, 1)
    assert exposed(FOUR, 3000, lambda nbytes: nbytes / 1000) == Exposure(7.0, 4.0, 4.0, 3.0, 2)
    assert exposed(FOUR, 1 << 40, lambda nbytes: 0.0) == Exposure(4.0, 4.0, 0.0, 0.0, 1)
    assert exposed([], 100, lambda nbytes: 1.0) == Exposure(0.0, 0.0, 0.0, 0.0, 0)


def test_a_large_gradient_goes_alone():
    seen = []
    gradients = [Gradient("a", 10, 1.0), Gradient("b", 1000, 1.0), Gradient("c", 10, 1.0), Gradient("d", 10, 1.0)]
    exposed(gradients, 100, lambda nbytes: seen.append(nbytes) or 0.0)
    assert seen == [40, 4000, 80]


def test_sizes():
    assert sizes(100_000) == [ALONE, 4096, 16384, 65536, 100_000]
    assert sizes(100) == [ALONE, 100]


def test_buckets_neither_tiny_nor_giant_are_best_on_ethernet():
    model = load("resnet50")
    points = curve(model.gradients, timer([find("ring")], find_machine("ethernet-10g"), 64))
    left = [found.exposed for _, found in points]
    best = left.index(min(left))
    assert 1 << 20 <= points[best][0] <= 64 << 20
    assert left[0] > 4 * left[best] and left[-1] > 4 * left[best]
    assert points[0][1].buckets == 161 and points[-1][1].buckets == 1
    assert isclose(points[-1][1].exposed, points[-1][1].communication)


def test_the_fastest_algorithm_prices_a_bucket():
    machine = find_machine("ethernet-10g")
    both, ring, doubling = (timer([find(name) for name in names], machine)
                            for names in (("ring", "recursive_doubling"), ("ring",), ("recursive_doubling",)))
    assert both(64) == doubling(64) < ring(64) and both(1 << 26) == ring(1 << 26) < doubling(1 << 26)
