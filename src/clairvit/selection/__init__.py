"""Choose a method for a model and data: rankings with confidence intervals and start-layer search."""
