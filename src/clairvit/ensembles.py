"""Methods made of methods: the mean of several, or of one on noisy or shifted copies of the image.

`cv.explain(model, images, cv.ensembles.smooth("ixg", n=8))` is the method string "smooth(ixg,n=8)".
"""

from clairvit.methods.ensembles import ensemble, shift, smooth

__all__ = ["ensemble", "shift", "smooth"]
