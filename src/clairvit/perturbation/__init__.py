"""Perturb: the same model and target on other inputs. One engine for sampling methods and faithfulness metrics."""
