"""Names for the beginnings of a prompt, by which the control plane knows who has computed them.

They are cut from the digests that name cached blocks, under a key of the cluster's that the control
plane hands out: tenant and tokens are in them, and neither can be told from them. Only
where all caches are shared between tenants the tenant is left out.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cluster.kv.prefix_index import PrefixIndex
from cluster.request import MAX_PREFIX_NAMES, NO_PREFIX, PromptPrefix

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cluster.config import PoolConfig

_MAX_TOKENS = 16_384
"""Of a prompt's beginning that is named: this runs on the event loop."""
_NAME_BYTES = 8


class PrefixNames:
    """Names prompts under the key of the moment."""

    def __init__(self, model: str, pools: Iterable[PoolConfig]) -> None:
        caching = [pool for pool in pools if pool.prefix_cache]
        self._model = model
        self._unit = math.lcm(*(pool.block_size for pool in caching)) if caching else 0
        self._are_tenants_one = bool(caching) and all(pool.prefix_shared for pool in caching)
        self._key = b""
        self._index: PrefixIndex | None = None

    def of(self, key: bytes, tenant: str, prompt_ids: tuple[int, ...]) -> PromptPrefix:
        """Return the names of a prompt's beginnings; none without a key or a prefix cache."""
        # The last token is always computed.
        num_blocks = min(len(prompt_ids) - 1, _MAX_TOKENS) // self._unit if self._unit else 0
        if not key or num_blocks < 1:
            return NO_PREFIX
        if key != self._key or self._index is None:
            self._key = key
            self._index = PrefixIndex(
                key=key, model_fingerprint=self._model, block_size=self._unit
            )  # fmt: skip
        digests: list[bytes] = []
        owner = "" if self._are_tenants_one else tenant
        self._index.extend(digests, owner, prompt_ids[: num_blocks * self._unit])
        step = 1
        while num_blocks // step > MAX_PREFIX_NAMES:
            step *= 2
        names = [int.from_bytes(d[:_NAME_BYTES], "little") for d in digests[step - 1 :: step]]
        return PromptPrefix(stride_tokens=step * self._unit, names=tuple(names))
