"""One decision for all processes, through the coordination service: no device takes part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import jax
import orbax.checkpoint as ocp

from mtx.errors import UserError

_DECIDED, _REFUSED = "decided:", "refused:"
_rounds: Counter[str] = Counter()  # a key of the service can be set only once


def agree(
    subject: str, said: str, decide: Callable[[Sequence[str]], str], *, timeout_s: float
) -> str:
    """The decision that process 0 makes from what every process has said, on all of them.

    All processes must call this, for each subject in the same order. If `decide` raises a
    UserError, all of them raise it. Raises TimeoutError if some process has not spoken, or process
    0 has not decided, within the time.
    """
    if jax.process_count() == 1:
        return decide([said])
    _rounds[subject] += 1
    key, timeout_ms = f"mtx_agree/{subject}/{_rounds[subject]}", round(timeout_s * 1000)
    client = ocp.multihost.get_jax_distributed_client()
    try:
        if jax.process_index():
            client.key_value_set(f"{key}/{jax.process_index()}", said)
        else:
            all_said = [said, *_take_all(client, key, timeout_ms)]
            # All processes have come this far, so none needs the previous decision any more.
            client.key_value_delete(f"mtx_agree/{subject}/{_rounds[subject] - 1}/decision")
            try:
                decision = _DECIDED + decide(all_said)
            except UserError as error:
                decision = _REFUSED + str(error)
            client.key_value_set(f"{key}/decision", decision)
        decision = client.blocking_key_value_get(f"{key}/decision", timeout_ms)
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        raise TimeoutError(f"a process has not answered within {timeout_s:.0f} s") from error
    if decision.startswith(_REFUSED):
        raise UserError(decision.removeprefix(_REFUSED))
    return decision.removeprefix(_DECIDED)


def _take_all(client, key: str, timeout_ms: int) -> Iterator[str]:
    """What the other processes have said; each key is then deleted from the service."""
    for process in range(1, jax.process_count()):
        yield client.blocking_key_value_get(f"{key}/{process}", timeout_ms)
        client.key_value_delete(f"{key}/{process}")
