"""`cv.metrics()`: what a map is worth. Scores with their uncertainty, and what luck would have scored."""

from clairvit._room import callable_room

callable_room(__name__, "clairvit.metrics.metric:metrics")
