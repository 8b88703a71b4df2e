"""Studies: models trained, methods chosen and papers repeated on whole sets of images."""
