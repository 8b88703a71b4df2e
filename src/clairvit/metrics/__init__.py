"""Metrics: score explanations, with uncertainty and random baselines (`cv.evaluate`)."""
