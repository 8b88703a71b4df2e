"""The state of a server that outlives the app around it: closing the app leaves its job queues open."""

from __future__ import annotations

from clairvit.web.state import AppState


class Unclosed(AppState):
    def close(self) -> None:
        pass


def unclosed(state: AppState) -> AppState:
    return Unclosed(state.models, state.cards, state.queues, state.uploads, state.time_limit)
