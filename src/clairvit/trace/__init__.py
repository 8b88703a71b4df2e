"""`cv.trace(model, images, target=None, rules="plain")`: what one forward and one backward pass recorded."""

from clairvit._room import callable_room

callable_room(__name__, "clairvit.trace.trace:trace")
