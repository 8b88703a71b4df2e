"""Methods made of methods: the mean of several, or of one on noisy or shifted copies of the image, or one refined.

`cv.explain(model, images, cv.ensembles.smooth("ixg", n=8))` is the method string "smooth(ixg,n=8)".
"""

from clairvit.methods.ensembles import ensemble, shift, smooth
from clairvit.methods.refined import refine

__all__ = ["ensemble", "refine", "shift", "smooth"]
