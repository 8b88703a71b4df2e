"""A server state that stays open when its app is closed, so that several tests share its job queues."""

from __future__ import annotations

from clairvit.web.state import AppState


class Unclosed(AppState):
    def close(self) -> None:
        pass


def unclosed(state: AppState) -> AppState:
    return Unclosed(state.models, state.cards, state.queues, state.uploads, state.time_limit)
