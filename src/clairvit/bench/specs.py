"""Specs of a study: its methods and metrics by their text, each parsed once."""

from __future__ import annotations

from collections.abc import Iterable

from clairvit.methods.registry import METHODS
from clairvit.methods.spec import MethodSpec, resolve_method
from clairvit.metrics.registry import METRICS, MetricSpec, resolve_metric


class Specs:
    """Methods and metrics by their text: given, or parsed when they are first asked for.

    All of them are parsed anew after something was registered, as a name may have another function then.

    Args:
        methods: Those that are parsed already.
        metrics: Those that are parsed already.
    """

    def __init__(self, methods: Iterable[MethodSpec] = (), metrics: Iterable[MetricSpec] = ()) -> None:
        self._methods = {spec.text: spec for spec in methods}
        self._metrics = {spec.text: spec for spec in metrics}
        self._registered = METHODS.changes, METRICS.changes

    def method(self, text: str) -> MethodSpec:
        """Return the spec of a method; raise BadInput or UnknownName as `resolve_method` does."""
        self._forget_outdated()
        if text not in self._methods:
            self._methods[text] = resolve_method(text)
        return self._methods[text]

    def metric(self, text: str) -> MetricSpec:
        """Return the spec of a metric; raise BadInput or UnknownName as `resolve_metric` does."""
        self._forget_outdated()
        if text not in self._metrics:
            self._metrics[text] = resolve_metric(text)
        return self._metrics[text]

    def _forget_outdated(self) -> None:
        """Forget every spec if something was registered since."""
        registered = METHODS.changes, METRICS.changes
        if registered != self._registered:
            self._methods, self._metrics, self._registered = {}, {}, registered
