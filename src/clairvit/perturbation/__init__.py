"""Perturbation: run the model on other inputs for the same target, for sampling methods and faithfulness metrics."""
