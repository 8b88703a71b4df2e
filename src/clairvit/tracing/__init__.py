"""Record one forward and one backward pass of a model (`cv.trace`)."""
