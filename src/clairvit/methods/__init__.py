"""`cv.methods()`: every registered method, as objects with name, family, needs, cost and paper."""

from clairvit._room import callable_room

callable_room(__name__, "clairvit.methods.method:methods")
