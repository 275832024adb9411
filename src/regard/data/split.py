"""Splitting off validation examples: by a hash of the source text, so that no source is ever on both sides."""

from __future__ import annotations

from hashlib import blake2b

SHARE = 0.05
LEAST, MOST = 50, 2_000  # examples
LARGEST_SHARE = 0.2  # of a small file no larger part is taken, even if that makes fewer than LEAST


def wanted(examples: int) -> int:
    """How many of `examples` to hold out."""
    return max(1, round(min(max(SHARE * examples, min(LEAST, LARGEST_SHARE * examples)), MOST)))


class Splitter:
    """Finds the sources to hold out while they stream by; memory holds only the candidates."""

    def __init__(self, seed: int) -> None:
        self._key = str(seed).encode()
        self._counts: dict[bytes, int] = {}  # hash of a source -> its examples
        self._bound = b"\xff" * 8  # hashes above are no candidates
        self._examples = 0
        self._chosen: frozenset[bytes] = frozenset()

    def _hash(self, source: str) -> bytes:
        return blake2b(source.encode("utf-8", "surrogatepass"), digest_size=8, key=self._key).digest()

    def see(self, source: str) -> None:
        """Take note of an example's source."""
        self._examples += 1
        digest = self._hash(source)
        if digest > self._bound:
            return
        self._counts[digest] = self._counts.get(digest, 0) + 1
        if len(self._counts) >= 4 * MOST:  # keep the smallest; what goes now could not come back
            smallest = sorted(self._counts)[: 2 * MOST]
            self._bound = smallest[-1]
            self._counts = {digest: self._counts[digest] for digest in smallest}

    def choose(self) -> int:
        """Decide, after the last example; return how many are held out (0: all have one source, nothing to split)."""
        if len(self._counts) < 2:
            return 0
        want = wanted(self._examples)
        chosen: list[bytes] = []
        total = 0
        for digest in sorted(self._counts):
            count = self._counts[digest]
            if total + count <= want:
                chosen.append(digest)
                total += count
        if not chosen:  # every source has more examples than wanted: take the rarest
            chosen = [min(self._counts, key=lambda digest: (self._counts[digest], digest))]
            total = self._counts[chosen[0]]
        self._chosen = frozenset(chosen)
        return total

    def held_out(self, source: str) -> bool:
        """Whether examples with this source belong to validation."""
        return self._hash(source) in self._chosen
