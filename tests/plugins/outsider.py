"""A distribution of somebody else: collectives over sockets, by way of rank 0, and a KV allocator that fills its pools from
the top and shares nothing."""

from __future__ import annotations

import time
from multiprocessing.connection import Client, Connection, Listener
from typing import ClassVar

import numpy as np

from engine.backend.v1 import API, CollectivesManifest, Probe
from engine.errors import AdmissionError
from engine.kv import AllocatorManifest, PoolStats, PrefixHit


class OutsiderError(Exception):
    pass


def _address(text):
    host, _, port = text.rpartition(":")
    return host, int(port)


class Sockets:
    fixed_order = True

    def __init__(self, group):
        self.rank, self.size, self._timeout = group.rank, len(group.addresses), group.timeout
        self._peers: list[Connection] = []
        if self.rank == 0:
            with Listener(_address(group.addresses[0])) as listener:
                found = {}
                while len(found) < self.size - 1:
                    peer = listener.accept()
                    found[peer.recv()] = peer
            self._peers = [found[rank] for rank in range(1, self.size)]
        else:
            self._peers = [self._connect(_address(group.addresses[0]))]
            self._peers[0].send(self.rank)

    def _connect(self, address):
        end = time.monotonic() + self._timeout
        while True:
            try:
                return Client(address)
            except ConnectionError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.02)

    def all_reduce(self, value):
        return _sum(self._exchange("all_reduce", value))

    def all_gather(self, value, axis=0):
        return np.concatenate(self._exchange("all_gather", value, axis), axis)

    def reduce_scatter(self, value):
        return _sum(self._mine(self._exchange("reduce_scatter", value)))

    def all_to_all(self, value):
        return np.concatenate(self._mine(self._exchange("all_to_all", value)))

    def close(self):
        for peer in self._peers:
            peer.close()

    def _mine(self, values):
        return [np.split(value, self.size)[self.rank] for value in values]

    def _exchange(self, op, value, axis=0):
        said = (op, axis, value.shape, value.dtype.str)
        try:
            if self.rank:
                self._peers[0].send((said, value))
                everyone = self._receive(self._peers[0])
            else:
                everyone = [(said, value), *map(self._receive, self._peers)]
                for peer in self._peers:
                    peer.send(everyone)
        except (OSError, EOFError, ValueError):
            raise OutsiderError(f"Rank {self.rank} has lost another rank.") from None
        if any(other != said for other, _ in everyone):
            raise OutsiderError("The ranks do not call the same.")
        return [array for _, array in everyone]

    def _receive(self, peer):
        if not peer.poll(self._timeout):
            self.close()
            raise EOFError
        return peer.recv()


def _sum(values):
    if values[0].dtype == np.uint16:
        total = np.sum([(v.astype(np.uint32) << 16).view(np.float32) for v in values], axis=0, dtype=np.float32)
        bits = total.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


class FromTheTop:
    """Blocks one by one from the end of each pool; a fork copies, and nothing is cached."""

    made: ClassVar[list[FromTheTop]] = []

    def __init__(self, spec):
        self.groups, self._total = spec.groups, [count - 1 for count in spec.num_blocks]
        self._free = [list(range(1, count)) for count in spec.num_blocks]
        self._late = [[] for _ in self.groups]  # what a copy of this step may still be read from
        self._copies = [{} for _ in self.groups]
        self._held, self._length = {}, {}
        self.most = 0
        self.made.append(self)

    def open(self, seq_id, limit, salt=b"", prompt=0):
        for group, total in zip(self.groups, self._total, strict=True):
            if group.blocks(limit) > total:
                raise AdmissionError(f"{limit} tokens need more than the {total} blocks of the pool.")
        self._held[seq_id], self._length[seq_id] = [() for _ in self.groups], 0

    def match(self, seq_id, token_ids, limit):
        return PrefixHit(0, ((),) * len(self.groups))

    def can_fit(self, seq_id, count, hit=None):
        end = self._length[seq_id] + count + (hit.num_tokens if hit else 0)
        held = self._held[seq_id]
        return all(
            group.blocks(end) - len(own) <= len(free)
            for group, own, free in zip(self.groups, held, self._free, strict=True)
        )

    def allocate(self, seq_id, count, hit=None):
        if not self.can_fit(seq_id, count, hit):
            return False
        end = self._length[seq_id] + count + (hit.num_tokens if hit else 0)
        for n, group in enumerate(self.groups):
            own = self._held[seq_id][n]
            self._held[seq_id][n] = own + tuple(self._free[n].pop() for _ in range(group.blocks(end) - len(own)))
        self._length[seq_id] = end
        self.most = max(self.most, *(max(own, default=0) for own in self._held[seq_id]))
        return True

    def tables(self, seq_id):
        return tuple(self._held[seq_id])

    def can_fork(self, parent, children):
        end = self._length[parent] + 1
        return all(
            group.blocks(end) * (children + 1) <= len(free) for group, free in zip(self.groups, self._free, strict=True)
        )

    def fork(self, parent, child):
        self.allocate(child, self._length[parent])
        for source, own, copies in zip(self._held[parent], self._held[child], self._copies, strict=True):
            copies.update({to: copies.get(block, block) for block, to in zip(source, own, strict=False)})

    def take_copies(self):
        found = tuple(tuple((source, to) for to, source in copies.items()) for copies in self._copies)
        for free, late, copies in zip(self._free, self._late, self._copies, strict=True):
            free.extend(late)
            late.clear()
            copies.clear()
        return found

    def commit(self, seq_id, token_ids, num_computed):
        pass

    def free(self, seq_id):
        for own, late, copies in zip(self._held[seq_id], self._late, self._copies, strict=True):
            for block in own:
                copies.pop(block, None)
            late.extend(own)
        self._held[seq_id], self._length[seq_id] = [() for _ in self.groups], 0

    def close(self, seq_id):
        self.free(seq_id)
        del self._held[seq_id], self._length[seq_id]

    def forget(self):
        pass

    def stats(self):
        free = [len(own) + len(late) for own, late in zip(self._free, self._late, strict=True)]
        return tuple(PoolStats(total, n, total - n, 0) for total, n in zip(self._total, free, strict=True))

    def check(self):
        for n, total in enumerate(self._total):
            held = [block for own in self._held.values() for block in own[n]]
            assert sorted([*held, *self._free[n], *self._late[n]]) == list(range(1, total + 1))


sockets = CollectivesManifest("sockets", API, lambda: Probe(True, "sockets", score=-1), Sockets)
from_the_top = AllocatorManifest("from-the-top", FromTheTop)
