"""One attempt at a choice: a grant's legs, what they say, and the way round a lost decode worker.

    legs ──news──▶ ``next`` ──tokens──▶ the request's life
                      │
                      ▼ no decode worker has the KV, and the prefill leg still holds it
             ``Search``: another decode worker, whom the prefill worker then sends the export to

A decode leg that failed ends the attempt only where the prefill leg can't be redirected: it is
over, or the decode worker has spoken (then it has the KV, and the export is gone). What the old
decode worker still says is dropped: legs are told apart by their worker's incarnation.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
from typing import TYPE_CHECKING

from cluster.control.facts import ExportRef, Grant
from cluster.errors import EngineFault, HandoffFailed, PdserveError, WorkerLost
from cluster.handoff import AbortCause
from cluster.request import (
    NO_PREFIX,
    ExportWaiting,
    FinishReason,
    Leg,
    LegEnd,
    LegKey,
    LegKind,
    Peer,
    Preempted,
    PromptLogprobs,
    PromptPrefix,
    Redirect,
    Token,
)
from router.legs import LegNews, Said
from router.merge import Merger
from router.missed import REPORT_S, START_S, Missed
from router.peers import peers_of
from router.score_gate import ScoreGate
from router.search import Search

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cluster.request import Request
    from router.owner import AttemptOwner
    from router.parts import Parts

logger = logging.getLogger(__name__)

COMMIT_GRACE_S = 1.0
"""How long a decode worker may take to show that it had the KV before the prefill leg was over."""
REDIRECT_GAP_S = 0.25
"""Between two redirects of an export at least: a link that breaks at once is not tried in a rush.
How often they may fail is for the export's lease and the deadline to say."""

_News = LegNews | Grant | PdserveError | Missed


class Attempt:
    """The legs of one grant, and of those that redirect its export."""

    def __init__(
        self,
        grant: Grant,
        request: Request,
        output_ids: Sequence[int],
        *,
        parts: Parts,
        owner: AttemptOwner,
        prefix: PromptPrefix = NO_PREFIX,
    ) -> None:
        """``output_ids`` are out already."""
        self._prefix = prefix
        self.peers = peers_of(grant)
        self.key = LegKey(request.request_id, grant.attempt, request.choice)
        self.reason = grant.reason
        self.grant_ids = [grant.grant_id]
        """Each is to be given back once, when the attempt is over."""
        self.num_redirects = 0
        self.merger = Merger(
            self.peers, max_tokens=request.params.max_tokens, num_output_tokens=len(output_ids)
        )
        # Scores come before the first token: whoever has one has them all.
        asks_scores = request.params.prompt_logprobs and not output_ids
        self._params = dataclasses.replace(request.params, prompt_logprobs=asks_scores)
        self._gate = ScoreGate(len(request.prompt_ids) if asks_scores else 0)
        self._request = request
        self._output_ids = tuple(output_ids)
        self._parts = parts
        self._owner = owner
        self._replaced: list[Peer] = []
        self._leaving: set[str] = set()  # incarnations whose replaced leg has not ended
        self._handoff_id = grant.handoff_id
        self._number = grant.attempt  # of the latest grant
        self._num_preempted_before = owner.num_preemptions
        self._news: asyncio.Queue[_News] = asyncio.Queue()
        self._started_at = float("inf")
        self._has_spoken = False  # whoever computes
        self._search: Search | None = None
        self._granted: Grant | None = None  # waits for the end of an old leg on the same worker
        self._missed: Missed | None = None  # came before the leg's start can have been lost
        self._next_redirect_at = float("-inf")

    async def start(self) -> None:
        """Start all legs at once: none waits for the other's answer."""
        for kind in self.peers:
            await self._start(kind)
        self._started_at = self._parts.clock.now()

    async def next(self) -> list[Token] | PromptLogprobs | FinishReason:
        """Wait for tokens that are due, for what was said of the prompt, or for the finish.

        Raises the error that ends the attempt.
        """
        while True:
            if (due := self._gate.release()) is not None:
                return due
            news = await self._hear()
            if isinstance(news, LegNews):
                come = self._heard(news)
                if isinstance(come, PromptLogprobs):
                    return come
                if come is not None:
                    self._gate.hold(come)
            elif isinstance(news, Grant):
                self._granted = news
            elif isinstance(news, Missed):
                self._leg_missed(news)
            else:
                self._stop_search(news)
            if self._granted is not None:
                await self._redirect(self._granted)

    def on_leg_missed(self, number: int, error: PdserveError) -> None:
        """Take word that a worker of the grant of that number reports no leg of this."""
        self._news.put_nowait(Missed(number, error))

    def abort(self, cause: AbortCause) -> None:
        """Tell the legs to end."""
        for kind, peer in self.peers.items():
            # After a good end the decode worker's COMMIT ends the prefill leg, if it hasn't yet.
            if cause is not AbortCause.FINISHED or kind is not LegKind.PREFILL:
                self._parts.workers.abort(peer, self.key, cause)

    async def last_words(self) -> None:
        """Wait until all legs have ended; what they still make is wasted."""
        while self.merger.open_kinds:
            news = await self._news.get()
            if isinstance(news, LegNews):
                if isinstance(news.said, LegEnd) and self._is_current(news):
                    self.merger.last_word(news.kind, news.said)
                self._waste(news)

    def close(self, cause: AbortCause) -> None:
        """End the legs and the search; what still comes of them is wasted. Never raises."""
        if self._search is not None:
            self._search.stop()
            self._search = None
        self.abort(cause)
        metrics = self._parts.metrics
        metrics.wasted(self.merger.num_held + self._gate.num_held)
        while not self._news.empty():
            self._waste(self._news.get_nowait())
        for peer in (*self.peers.values(), *self._replaced):
            self._parts.workers.pass_to(peer, self.key, self._waste)
        metrics.attempt_ended(num_repeats=self.merger.num_repeats, num_redirects=self.num_redirects)

    # ---- legs

    async def _start(self, kind: LegKind) -> None:
        request, peer = self._request, self.peers[kind]
        leg = Leg(
            key=self.key,
            kind=kind,
            prompt_ids=request.prompt_ids,
            output_ids=self._output_ids,
            params=self._params,
            tenant=request.tenant,
            priority=request.priority,
            expected_tokens=request.expected_tokens,
            prefix=self._prefix,
            waited_s=self._owner.age_s(),
            num_preemptions=self._owner.num_preemptions,
            remaining_s=request.deadline - self._parts.clock.now(),
            grant_id=self.grant_ids[-1],
            handoff_id="" if kind is LegKind.LOCAL else self._handoff_id,
            peer=self.peers.get(LegKind.DECODE) if kind is LegKind.PREFILL else None,
        )
        await self._parts.workers.start(leg, peer, self._news.put_nowait)

    async def _hear(self) -> _News:
        doubt, missed = self.merger.doubt, self._missed
        patience_s = None if doubt is None else COMMIT_GRACE_S
        if doubt is None and missed is not None and self._granted is None:
            patience_s = self._started_at + START_S + REPORT_S - self._parts.clock.now()
        try:
            # Not ``wait_for``: before 3.12 a cancel that comes with news is lost in it.
            async with asyncio.timeout(patience_s):
                return await self._news.get()
        except TimeoutError:
            if doubt is not None:
                raise doubt from None
            assert missed is not None, "nothing else is waited for"
            self._missed = None
            return missed

    def _is_current(self, news: LegNews) -> bool:
        peer = self.peers[news.kind]
        return peer.incarnation == news.incarnation and news.kind in self.merger.open_kinds

    def _heard(self, news: LegNews) -> list[Token] | PromptLogprobs | FinishReason | None:
        """Take what a leg says; return what goes to the reader, None where there is nothing."""
        kind, said = news.kind, news.said
        self._count_preemptions(said)
        if isinstance(said, Preempted) or not self._is_current(news):
            self._heard_late(news)
            return None
        self._has_spoken |= kind is not LegKind.DECODE
        if isinstance(said, Token):
            return self.merger.token(kind, said) or None
        if isinstance(said, PromptLogprobs):
            return said if self._gate.scored(said) else None
        if isinstance(said, ExportWaiting):
            self._export_waits(said)
            return None
        if said.error is not None:
            self._note_lost(kind, said.error, is_death=news.is_death)
            if kind is LegKind.DECODE and self._can_redirect(said.error):
                self.merger.last_word(kind, said)
                self._look_for_another(said.error)
                return None
        return self._ended(kind, said)

    def _ended(self, kind: LegKind, end: LegEnd) -> FinishReason | None:
        is_handover = kind is LegKind.PREFILL and not (end.error or end.finish_reason)
        if is_handover and self._search is not None:
            raise self._search.error  # handed over to the decode worker that is lost
        reason = self.merger.end(kind, end)
        if kind is not LegKind.DECODE and not self._gate.is_open:
            raise end.error or HandoffFailed("the prompt's scores were lost", stage=kind.value)
        if is_handover and self.num_redirects and not self.merger.has_decode_spoken:
            # That end may have crossed with the redirect.
            self.merger.doubt = HandoffFailed("handed over to a lost worker", stage="handoff")
        return reason

    def _leg_missed(self, missed: Missed) -> None:
        """Act where the start of a leg was lost, and is neither over nor still on its way.

        The control plane tells once: who is told too early looks again.
        """
        number, error = missed.number, missed.error
        if self.merger.has_decode_spoken:
            return
        is_to_come = self._granted is not None and number == self._granted.attempt
        if is_to_come or self._parts.clock.now() - self._started_at < START_S:
            self._missed = missed
            return
        decode = self.peers.get(LegKind.DECODE)
        if decode is not None and decode.worker_id == error.worker_id:
            is_current = number == self._number and LegKind.DECODE in self.merger.open_kinds
            if is_current and not self._parts.holds(decode, self.grant_ids[-1]):
                self._decode_missed(decode, error)
            return
        peer = next(p for kind, p in self.peers.items() if kind is not LegKind.DECODE)
        is_old = self._has_spoken or number != self.key.attempt
        if is_old or self._parts.holds(peer, self.grant_ids[0]):
            return
        logger.warning("leg=%s worker=%s has never had it", self.key, peer.worker_id)
        self._parts.workers.forget(peer, self.key)
        self._owner.note_lost(peer.incarnation, is_death=False)
        error.worker_id = peer.worker_id
        raise error

    def _decode_missed(self, peer: Peer, error: PdserveError) -> None:
        """Pass the export on; the one worker there is may well get the next start."""
        logger.warning("leg=%s worker=%s has never had it", self.key, peer.worker_id)
        if self.num_redirects:
            self._owner.note_lost(peer.incarnation, is_death=False)
        if not self._can_redirect(error):
            raise error
        self._look_for_another(error)

    def _note_lost(self, kind: LegKind, error: PdserveError, *, is_death: bool) -> None:
        if not isinstance(error, WorkerLost):
            return
        # A worker may tell of its peer's loss.
        named = [p for p in self.peers.values() if p.worker_id == error.worker_id]
        lost = (named or [self.peers[kind]])[0]
        self._owner.note_lost(lost.incarnation, is_death=is_death)

    # ---- the export

    def _export_waits(self, notice: ExportWaiting) -> None:
        if notice.handoff_id != self._handoff_id:
            return  # of a handoff that was given up for another already
        if self.merger.has_decode_spoken:
            # Only the COMMIT was lost: the decode worker has the KV.
            self._parts.workers.abort(self.peers[LegKind.PREFILL], self.key, AbortCause.FINISHED)
            return
        if self._search is not None:
            return
        self._note_lost(LegKind.DECODE, notice.error, is_death=False)
        notice.error.worker_id = notice.error.worker_id or self.peers[LegKind.DECODE].worker_id
        if not self._can_redirect(notice.error):
            raise notice.error
        self._look_for_another(notice.error)

    def _can_redirect(self, error: PdserveError) -> bool:
        return (
            LegKind.PREFILL in self.merger.open_kinds
            and not self.merger.has_decode_spoken
            and self._owner.may_go_on(error)
        )

    def _look_for_another(self, error: PdserveError) -> None:
        """Give the decode leg up and ask for another decode worker."""
        peer = self.peers[LegKind.DECODE]
        if LegKind.DECODE in self.merger.open_kinds:
            self._leaving.add(peer.incarnation)
        self.merger.close(LegKind.DECODE)
        self._parts.workers.abort(peer, self.key, AbortCause.FAULT)
        logger.info("leg=%s worker=%s to be replaced: %s", self.key, peer.worker_id, error.code)
        holder = self.peers[LegKind.PREFILL]
        export = ExportRef(
            grant_id=self.grant_ids[0],
            worker_id=holder.worker_id,
            incarnation=holder.incarnation,
        )
        self._replaced.append(peer)
        self._search = Search(
            functools.partial(self._owner.want, export),
            error,
            parts=self._parts,
            on_found=self._found,
            pause_s=self._next_redirect_at - self._parts.clock.now(),
        )

    def _found(self, news: Grant | PdserveError) -> None:
        if isinstance(news, Grant):
            self.grant_ids.append(news.grant_id)
        self._news.put_nowait(news)

    def _stop_search(self, refusal: PdserveError) -> None:
        """Nobody takes the export: it is computed again."""
        assert self._search is not None, "a refusal answers a search"
        logger.info("leg=%s not redirected: %s", self.key, refusal.code)
        raise self._search.error

    async def _redirect(self, grant: Grant) -> None:
        decode = grant.decode
        holder = self.peers[LegKind.PREFILL]
        if decode is None or decode.incarnation == holder.incarnation or not grant.handoff_id:
            raise EngineFault("a grant that no export can follow", stage="placement")
        if decode.incarnation in self._leaving:
            return  # the old leg's end is still to be heard, and has the same name
        self._granted = self._search = None
        self.num_redirects += 1
        self._next_redirect_at = self._parts.clock.now() + REDIRECT_GAP_S
        self.peers[LegKind.DECODE] = decode.peer
        self._handoff_id, self._number = grant.handoff_id, grant.attempt
        self._started_at = self._parts.clock.now()
        self.merger.reopen(LegKind.DECODE)
        logger.info("leg=%s handoff=%s redirected to=%s", self.key, grant.handoff_id,
                    decode.worker_id)  # fmt: skip
        await self._start(LegKind.DECODE)
        redirect = Redirect(
            key=self.key,
            handoff_id=grant.handoff_id,
            peer=decode.peer,
            num_preemptions=self._owner.num_preemptions,
        )
        self._parts.workers.redirect(holder, redirect)

    def _heard_late(self, news: LegNews) -> None:
        """Count what a decode leg that was replaced still says; its repeat is no new token."""
        said = news.said
        if isinstance(said, LegEnd) and news.kind is LegKind.DECODE:
            self._leaving.discard(news.incarnation)
        if isinstance(said, Token) and said.output_index > self.merger.first_index:
            self._parts.metrics.wasted(1)

    def _waste(self, news: _News) -> None:
        if isinstance(news, LegNews):
            self._count_preemptions(news.said)
            if isinstance(news.said, Token):
                self._parts.metrics.wasted(self.merger.surplus(news.said))

    def _count_preemptions(self, said: Said) -> None:
        if isinstance(said, Preempted):
            self._owner.note_preempted(said.num_preemptions)
        elif isinstance(said, LegEnd):
            # What was told as it happened may be more: it counts both legs of an attempt.
            before = self._num_preempted_before
            self._owner.note_preempted(before + said.times.num_preemptions)
