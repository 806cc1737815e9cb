"""Carries out a plan, in order, and stops at the first write that the API server refuses.

Every write can be repeated: server-side apply by nature, creation because the name is a function of the
content, deletion because it names a uid.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kerf_operator.actions import Action, Apply, Create, Delete
from kerf_operator.client import Client
from kerf_operator.errors import ApiError
from kerf_operator.observation import ApplyFailure

__all__ = ["execute"]

logger = logging.getLogger(__name__)


def execute(client: Client, actions: Sequence[Action]) -> list[ApplyFailure]:
    """Do the actions.

    Returns:
        What the API server refused (at most one entry); empty when everything was done.

    Raises:
        ApiError: the API server could not be reached or is in trouble; the reconcile is repeated.
    """
    for action in actions:
        try:
            _do(client, action)
        except ApiError as error:
            if error.transient:
                raise
            kind, name = action.target.split("/", 1)
            logger.warning("%s", error)
            return [ApplyFailure(kind, name, error.code, error.reason, error.message)]
        logger.info("%s %s", type(action).__name__.lower(), action.target)
    return []


def _do(client: Client, action: Action) -> None:
    match action:
        case Apply():
            client.apply(action.manifest, manager=action.manager)
        case Create():
            try:
                client.create(action.manifest)
            except ApiError as error:
                if not error.already_exists:
                    raise
        case Delete():
            try:
                client.delete(action.kind, action.name, namespace=action.namespace, uid=action.uid)
            except ApiError as error:
                if not error.conflict:
                    raise  # a conflict: another object has that name now, ours is gone
