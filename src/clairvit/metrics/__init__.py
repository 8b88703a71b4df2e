"""Score explanations, with uncertainty and random baselines (`cv.evaluate`)."""
