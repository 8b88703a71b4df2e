"""Pictures of patch tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib import pyplot

import clairvit as cv
from clairvit.plotting.features import component_colours, feature_layers_figure, features_figure
from helpers.tiny_models import pixels, wrapped


@pytest.fixture
def features() -> cv.results.PatchFeatures:
    return cv.features(wrapped("timm-vit"), pixels("timm-vit"), layer="all")


def test_colours_run_over_the_percentiles_of_all_images(features: cv.results.PatchFeatures) -> None:
    low, high = np.percentile(features.pca.reshape(-1, 3).numpy(), [1, 99], axis=0)
    for item in range(2):
        expected = ((features.pca[item].numpy() - low) / (high - low)).clip(0, 1)
        assert np.abs(component_colours(features, item) - expected).max() <= 16 * np.finfo(np.float64).eps
    assert np.array_equal(component_colours(features[1], 0), component_colours(features, 1))


def test_the_background_is_black() -> None:
    features = cv.features(wrapped("timm-vit"), pixels("timm-vit"), foreground="negative")
    assert features.foreground is not None
    colours = component_colours(features, 0)
    assert not colours[~features.foreground[0].numpy()].any()
    assert colours[features.foreground[0].numpy()].any()


def test_a_figure_has_a_tile_per_picture(features: cv.results.PatchFeatures) -> None:
    assert len(features_figure(features).axes) == 2 * 3
    assert len(features_figure(features, patch=(1, 2)).axes) == 2 * 4
    assert len(feature_layers_figure(features).axes) == 2 * (1 + 2)
    with pytest.raises(cv.errors.BadInput, match="layer='all'"):
        feature_layers_figure(features.layers[0])
    with pytest.raises(cv.errors.BadInput, match="of no image"):
        features_figure(features[:0])


def test_saved_pictures_plots_and_notebooks(features: cv.results.PatchFeatures, tmp_path: Path) -> None:
    first_features = features[0]
    assert first_features.save(tmp_path / "f.png", patch=(0, 0), dpi=50).read_bytes()[:4] == b"\x89PNG"
    assert first_features.save(tmp_path / "l.png", layers=True, dpi=50).stat().st_size > 0
    assert first_features._repr_png_()[:4] == b"\x89PNG"
    assert len(features.plot()) == 2
    with pytest.raises(cv.errors.BadInput, match="1 axes were given for 2 images"):
        features.plot(pyplot.figure().add_subplot())
    pyplot.close("all")
    with pytest.raises(cv.errors.UnknownName, match="'smoth' is not a display option"):
        first_features.save(tmp_path / "f.png", smoth=True)


def test_a_component_without_variance_is_grey() -> None:
    features = cv.features(wrapped("timm-vit"), pixels("timm-vit"))
    flat = cv.results.PatchFeatures(**{**vars(features), "limits": torch.zeros(2, 3, dtype=torch.float64)})
    assert (component_colours(flat, 0) == 0.5).all()
