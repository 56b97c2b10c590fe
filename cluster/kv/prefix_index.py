"""Which full blocks hold the KV of which tokens, so that a prompt can start behind a known prefix.

A full block is named by a keyed digest of everything its KV depends on: tenant, model, the digest
of the block before it (so all tokens before it), and its own tokens. Two tenants never find one
another's blocks, unless the index is a shared one, and without the key nobody can make two prompts
meet in one name. How tokens were sampled has no part in it.

    root(tenant, model, block size) ──▶ digest 0 ──▶ digest 1 ──▶ ...     one per full block

The control plane has names of its own for the beginnings of prompts. The last block of such a
beginning is known by its name too: whatever is evicted after it, what is before it is still there,
since the end of a chain goes first. So the control plane can be told what is gone.

The index only remembers names. Whose the blocks are is the pool's business, under whose lock all
of this runs but the making of digests, which touches nothing that is shared.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_DIGEST_BYTES = 32
_MAX_GONE = 1 << 13
_MAX_TOLD = 1 << 10
"""At a time."""
_ROOT, _BLOCK = b"pdserve-kv-root", b"pdserve-kv-block"
"""What is hashed, as BLAKE2's personalisation: neither can be taken for the other."""


class PrefixIndex:
    """Digest -> block and back, for one pool."""

    def __init__(
        self, *, key: bytes, model_fingerprint: str, block_size: int, is_shared: bool = False
    ) -> None:
        """``key`` is a secret of 16 to 64 bytes; blocks are compared within one index only.

        With ``is_shared`` tenants find one another's blocks.
        """
        if not 16 <= len(key) <= hashlib.blake2b.MAX_KEY_SIZE:
            raise ValueError(f"a key of 16 to 64 bytes, not of {len(key)}")
        self.block_size = block_size
        self._key = key
        self._is_shared = is_shared
        self._model_fingerprint = model_fingerprint.encode()
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}
        self._name_of: dict[int, int] = {}
        self._named: dict[int, int] = {}
        self._gone: dict[int, None] = {}
        self._has_lost = False

    def __len__(self) -> int:
        """Return the number of blocks that can be found."""
        return len(self._digest_of)

    def __contains__(self, block_id: int) -> bool:
        """Whether the block can be found by its prefix."""
        return block_id in self._digest_of

    def block_ids(self) -> frozenset[int]:
        """Return all blocks that can be found."""
        return frozenset(self._digest_of)

    def extend(self, digests: list[bytes], tenant: str, token_ids: Sequence[int]) -> None:
        """Append the digests of the full blocks that follow those of ``digests``.

        ``token_ids`` are the tokens of these blocks; of a partly filled last one nothing is
        made. Raises struct.error for ids that are not unsigned 32-bit numbers.
        """
        # tokens:  [ len(digests) full blocks, known ) [ token_ids: full blocks ) [ rest: ignored )
        parent = digests[-1] if digests else self._root(tenant)
        size = self.block_size
        for start in range(0, len(token_ids) - size + 1, size):
            packed = struct.pack(f"<{size}I", *token_ids[start : start + size])
            parent = self._digest(_BLOCK, parent + packed)
            digests.append(parent)

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest known beginning of this chain."""
        block_ids = []
        for digest in digests:
            block_id = self._block_of.get(digest)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def put(self, digest: bytes, block_id: int) -> None:
        """Make a block findable; where another has the same KV, that one stays the one found."""
        if block_id not in self._digest_of and digest not in self._block_of:
            self._block_of[digest] = block_id
            self._digest_of[block_id] = digest

    def forget(self, block_id: int) -> None:
        """Find the block no more; nothing happens where it could not be found."""
        digest = self._digest_of.pop(block_id, None)
        if digest is not None:
            del self._block_of[digest]
            self._unname(block_id)

    # ---- the control plane's names

    def name(self, digest: bytes, name: int) -> None:
        """Know the block of this digest by the control plane's name; it has one at a time."""
        block_id = self._block_of.get(digest)
        if block_id is None:  # another's block of the same digest was, and is evicted since
            self._lose(name)
            return
        if self._name_of.get(block_id) != name:
            self._unname(block_id)
            other = self._named.get(name)
            if other is not None:  # tenants may share a name whose blocks are apart
                del self._name_of[other]
            self._name_of[block_id] = name
            self._named[name] = block_id
        self._gone.pop(name, None)

    def miss(self, names: Iterable[int]) -> None:
        """Count as gone those that no block has: whoever was to compute them did not."""
        for name in names:
            if name not in self._named:
                self._lose(name)

    def take_gone(self) -> tuple[tuple[int, ...], bool]:
        """Return names that no block has any more, and whether others were lost count of.

        Each is told once; of very many the rest comes with the next call.
        """
        names = tuple(itertools.islice(self._gone, _MAX_TOLD))
        for name in names:
            del self._gone[name]
        has_lost, self._has_lost = self._has_lost, False
        return names, has_lost

    def _unname(self, block_id: int) -> None:
        name = self._name_of.pop(block_id, None)
        if name is not None and self._named[name] == block_id:
            del self._named[name]
            self._lose(name)

    def _lose(self, name: int) -> None:
        if len(self._gone) >= _MAX_GONE:
            self._gone.clear()
            self._has_lost = True
        self._gone[name] = None

    def _root(self, tenant: str) -> bytes:
        name = b"" if self._is_shared else tenant.encode()
        lengths = struct.pack("<QQQ", len(name), len(self._model_fingerprint), self.block_size)
        return self._digest(_ROOT, lengths + name + self._model_fingerprint)

    def _digest(self, what: bytes, data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=_DIGEST_BYTES, key=self._key, person=what).digest()
