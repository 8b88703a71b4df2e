"""Choose which output of a model is explained."""
