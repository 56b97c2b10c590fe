"""Who may call: API keys of tenants, from a file or an environment variable.

One key a line (in a variable, commas part them too), as ``tenant=key``, or as
``tenant:TIER=key`` or ``tenant:TIER:CEILING=key`` where its requests have another tier than the
default one unless they name one, and may name none above a ceiling. ``#`` begins a comment.
Only hashes stay in memory. With keys set, every route and method needs one but the health checks;
without, everybody is let in and there is one tenant, the empty one.
"""

from __future__ import annotations

import hmac
import os
import re
from collections import Counter
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from cluster.errors import InvalidRequest, QueueFull, StartupError, Unauthenticated
from cluster.policy.tiers import Tiers
from router.given import ANYBODY, Caller

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cluster.config import AuthConfig, DeployConfig

_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
_TIER = r"(?::[A-Za-z0-9-]{0,32})"
_OWNER = re.compile(f"{_TENANT.pattern}{_TIER}{{0,2}}")
_MIN_KEY_CHARS = 8
_MAX_KEY_CHARS = 512
_SCHEME = "bearer "


class Keys:
    """The keys that open the doors; none: the doors are open."""

    def __init__(self, tenants: Mapping[str, str] | None = None) -> None:
        """``tenants`` maps each key to its tenant, or to ``tenant:TIER:CEILING``."""
        self._digests = [
            (sha256(key.encode()).digest(), _caller(tenant, f"key-{number}"))
            for number, (key, tenant) in enumerate((tenants or {}).items())
        ]

    @classmethod
    def of(cls, config: DeployConfig) -> Keys:
        """Read the keys of a deploy file; raises StartupError as ``load`` and ``check_tiers``."""
        keys = cls.load(config.auth)
        keys.check_tiers(Tiers.of(config.scheduling))
        return keys

    @classmethod
    def load(cls, config: AuthConfig, environ: Mapping[str, str] = os.environ) -> Keys:
        """Read what the deploy file names; raises StartupError, which tells no key."""
        texts = []
        if config.keys_file:
            try:
                texts.append(Path(config.keys_file).read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise StartupError(f"auth.keys_file: {config.keys_file} cannot be read") from error
        if config.keys_env:
            if config.keys_env not in environ:
                raise StartupError(f"auth.keys_env: {config.keys_env} is not set")
            texts.append(environ[config.keys_env].replace(",", "\n"))
        if not texts:
            return cls()
        tenants: dict[str, str] = {}
        for text in texts:
            _parse(text, tenants)
        if not tenants:
            raise StartupError("auth: keys are asked for, and there is none")
        return cls(tenants)

    def check_tiers(self, tiers: Tiers) -> None:
        """Raise StartupError where a key names a tier that there is not."""
        for _, caller in self._digests:
            for name in (caller.tier, caller.ceiling):
                try:
                    tiers.rank(name)
                except InvalidRequest as error:
                    raise StartupError(
                        f"auth: tenant {caller.tenant}: {name!r} is none of scheduling.tiers"
                    ) from error

    @property
    def are_needed(self) -> bool:
        """Whether a call needs a key."""
        return bool(self._digests)

    def caller(self, authorization: str | None) -> Caller:
        """Return whom an ``authorization`` header or metadata entry names.

        Raises Unauthenticated. Takes as long whichever key it is, and whether it is one at all.
        """
        if not self._digests:
            return ANYBODY
        text = authorization or ""
        is_bearer = text[: len(_SCHEME)].lower() == _SCHEME
        key = text[len(_SCHEME) :].strip() if is_bearer else ""
        digest = sha256(key[:_MAX_KEY_CHARS].encode(errors="replace")).digest()
        found = None
        for known, caller in self._digests:
            if hmac.compare_digest(digest, known):
                found = caller
        if found is None or not key:
            raise Unauthenticated("a valid API key is needed: authorization: Bearer KEY")
        return found


def _caller(owner: str, key: str) -> Caller:
    tenant, tier, ceiling = [*owner.split(":"), "", ""][:3]
    return Caller(tenant, key, tier, ceiling)


def _parse(text: str, tenants: dict[str, str]) -> None:
    """Add the keys of a text to those that are known, each with its tenant."""
    for number, line in enumerate(text.splitlines(), 1):
        entry = line.strip()
        if not entry or entry.startswith("#"):
            continue
        tenant, separator, key = (part.strip() for part in entry.partition("="))
        is_key = (
            _MIN_KEY_CHARS <= len(key) <= _MAX_KEY_CHARS and key.isascii() and key.isprintable()
        )
        if not separator or not _OWNER.fullmatch(tenant) or not is_key or " " in key:
            raise StartupError(
                f"auth: line {number} of the keys is not tenant=key, with {_MIN_KEY_CHARS} to "
                f"{_MAX_KEY_CHARS} characters of ASCII without spaces"
            )
        if tenants.setdefault(key, tenant) != tenant:
            raise StartupError(f"auth: line {number} of the keys has a key of another tenant")


class StreamsPerKey:
    """Counts the open calls of each key."""

    def __init__(self, max_streams: int) -> None:
        self._max_streams = max_streams
        self._num_open: Counter[str] = Counter()

    def take(self, caller: Caller, *, is_known: bool = False) -> None:
        """Count one more; raises QueueFull where the key has too many already.

        ``is_known``: the call was let in before, and is only handed on.
        """
        if not caller.key:
            return
        if not is_known and self._num_open[caller.key] >= self._max_streams:
            raise QueueFull(
                f"{self._max_streams} calls of this API key are open, the most there may be",
                stage="edge",
                retry_after_s=1.0,
            )
        self._num_open[caller.key] += 1

    def give_back(self, caller: Caller) -> None:
        """Count one less."""
        if not caller.key:
            return
        self._num_open[caller.key] -= 1
        if not self._num_open[caller.key]:
            del self._num_open[caller.key]
