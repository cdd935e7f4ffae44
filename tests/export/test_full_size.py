"""One full-size model of each family, as users export it; trained where weights are installed."""

import pytest

import zoo

pytestmark = pytest.mark.untyped


@pytest.mark.parametrize("format_", ["pt2", "onnx"])
@pytest.mark.parametrize(
    ("name", "trained"),
    [("resnet50", False), ("efficientnet_lite0", True), ("all-minilm-l6-v2", True)],
)
def test_the_file_equals_the_model_at_sizes_it_has_not_seen(name, trained, format_, tmp_path):
    report = zoo.export(zoo.load(name, pretrained=trained), tmp_path, format=format_)
    assert report.max_abs_diff <= 1e-4
    assert len({tuple(case.sizes.items()) for case in report.cases}) >= 4
    assert report.path.stat().st_size > 1e6
