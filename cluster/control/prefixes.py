"""Which workers have probably computed which beginnings of prompts.

Routers name the beginnings of a prompt by a keyed digest of tenant and tokens (``router/prefix``);
without the key, which only routers and control plane have, nobody can name another's. What is
remembered here is who was given which names to compute, least recently used first to go, and no
more of it than the worker's cache can hold, or does hold once it has had to evict. The worker's
cache is the authority: a wrong guess costs time, and the worker tells what was found in truth.

    names of a want:  [ stride tokens ) [ stride tokens ) ... of its beginning; the last one's
                      name stands for all before it, too
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cluster.request import PromptPrefix

_MAX_REMEMBERED = 1 << 18
_MIN_REMEMBERED = 32
"""Of each worker, however many there are."""
_MAX_HOLDERS = 8
"""Workers that are told for one prompt, those with most of it."""


@dataclass(slots=True)
class _Cache:
    num_tokens: int = 0
    names: OrderedDict[int, int] = field(default_factory=OrderedDict)
    """Tokens that each stands for, the least recently used first."""


class PrefixTable:
    """What each worker has of the prompts that it was given."""

    def __init__(self) -> None:
        self._caches: dict[str, _Cache] = {}
        self._holders: defaultdict[int, dict[str, None]] = defaultdict(dict)
        self._asked: tuple[PromptPrefix, dict[str, int]] | None = None

    def learn(self, worker_id: str, capacity_tokens: int, prefix: PromptPrefix) -> None:
        """Note that a worker with a cache of so many tokens has or computes a prompt."""
        if not prefix.names:
            return
        self._asked = None
        cache = self._caches.get(worker_id)
        if cache is None:
            cache = self._caches[worker_id] = _Cache()
        names, holders, stride = cache.names, self._holders, prefix.stride_tokens
        cache.num_tokens -= stride * len(names)
        # The longer ones are of no use without the shorter ones, so they go first.
        for name in reversed(prefix.names):
            known = names.get(name)
            if known is None:
                names[name] = stride
                holders[name][worker_id] = None
            else:
                names.move_to_end(name)
                if known != stride:
                    cache.num_tokens += stride - known
                    names[name] = stride
        cache.num_tokens += stride * len(names)
        most = max(_MIN_REMEMBERED, _MAX_REMEMBERED // len(self._caches))
        self._trim(worker_id, cache, most, capacity_tokens)

    def drop(self, worker_id: str, names: Iterable[int]) -> None:
        """Note that a worker's cache does not have these."""
        cache = self._caches.get(worker_id)
        if cache is None:
            return
        self._asked = None
        for name in names:
            num_tokens = cache.names.pop(name, None)
            if num_tokens is not None:
                cache.num_tokens -= num_tokens
                self._drop(name, worker_id)

    def forget(self, worker_id: str) -> None:
        """Drop all that a worker had: it is gone."""
        self._asked = None
        cache = self._caches.pop(worker_id, None)
        for name in cache.names if cache is not None else ():
            self._drop(name, worker_id)

    def holders(self, prefix: PromptPrefix) -> dict[str, int]:
        """Return the workers that have most of a prompt, and how many tokens of it."""
        if not prefix.names:
            return {}
        if self._asked is not None and self._asked[0] is prefix:
            return self._asked[1]
        found: dict[str, int] = {}
        stride = prefix.stride_tokens
        sizes = range(len(prefix.names) * stride, 0, -stride)
        known = map(self._holders.get, reversed(prefix.names))
        for num_tokens, holders in zip(sizes, known, strict=True):
            if holders is None:
                continue
            for worker_id in holders:
                if len(found) == _MAX_HOLDERS:
                    break
                found.setdefault(worker_id, num_tokens)
            if len(found) == _MAX_HOLDERS:
                break
        self._asked = (prefix, found)
        return found

    def _trim(self, worker_id: str, cache: _Cache, max_names: int, max_tokens: int) -> None:
        while len(cache.names) > max_names or cache.num_tokens > max_tokens:
            name, num_tokens = cache.names.popitem(last=False)
            cache.num_tokens -= num_tokens
            self._drop(name, worker_id)

    def _drop(self, name: int, worker_id: str) -> None:
        holders = self._holders[name]
        del holders[worker_id]
        if not holders:
            del self._holders[name]
