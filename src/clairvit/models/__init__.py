"""Models: a module with its preprocessing, labels, layout and targets."""
