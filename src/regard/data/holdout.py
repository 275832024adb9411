"""Which examples are held out for validation, if the user names no file for it."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from zlib import crc32

VALID_SHARE = 0.05  # of the examples are held out for validation
MIN_VALID, MAX_VALID = 50, 2_000
CANDIDATES = 2 * MAX_VALID  # sources with the smallest hashes, from which those to hold out are chosen
KEY = b"1"  # of the hash; with it, the split is the one of earlier versions and their default seed
LARGEST_SHARE = 0.2  # of a small file no larger part is taken, even if that makes fewer than MIN_VALID


def valid_count(examples: int) -> int:
    """How many of `examples` to hold out."""
    return max(1, round(min(max(VALID_SHARE * examples, min(MIN_VALID, LARGEST_SHARE * examples)), MAX_VALID)))


class Splitter:
    """Finds the sources to hold out while they stream by; memory holds only the candidates.

    The smallest hashes are held out: the choice follows from the contents alone, not from their order or a seed.
    """

    def __init__(self, chosen: Iterable[tuple[int, bytes]] = ()) -> None:
        self._counts: dict[bytes, int] = {}  # hash of a source -> its examples
        self._sums: dict[bytes, int] = {}  # hash of a source -> its checksum
        self._bound = b"\xff" * 8  # hashes above are no candidates
        self._examples = 0
        self.chosen = frozenset(chosen)  # checksums and hashes of what is held out
        self._chosen_sums = frozenset(checksum for checksum, _ in self.chosen)
        self._keyed = blake2b(digest_size=8, key=KEY)

    def _hash(self, content: bytes) -> bytes:
        keyed = self._keyed.copy()
        keyed.update(content)
        return keyed.digest()

    def see(self, source: str | bytes) -> None:
        """Count an example's source, a text or the bytes of an image."""
        self._examples += 1
        content = _bytes(source)
        digest = self._hash(content)
        if digest > self._bound:
            return
        self._counts[digest] = self._counts.get(digest, 0) + 1
        self._sums[digest] = crc32(content)
        if len(self._counts) >= 2 * CANDIDATES:  # keep the smallest; what goes now could not come back
            smallest = sorted(self._counts)[:CANDIDATES]
            self._bound = smallest[-1]
            self._counts = {digest: self._counts[digest] for digest in smallest}
            self._sums = {digest: self._sums[digest] for digest in smallest}

    def choose(self) -> int:
        """Decide, after the last example; return how many are held out (0: all have one source, nothing to split)."""
        if len(self._counts) < 2:
            return 0
        want = valid_count(self._examples)
        chosen: list[bytes] = []
        total = 0
        candidates = sorted(self._counts)[:CANDIDATES]  # which others are still there depends on the order
        for digest in candidates:
            count = self._counts[digest]
            if total + count <= want:
                chosen.append(digest)
                total += count
        if not chosen:  # every source has more examples than wanted: take the rarest
            chosen = [min(candidates, key=lambda digest: (self._counts[digest], digest))]
            total = self._counts[chosen[0]]
        self.chosen = frozenset((self._sums[digest], digest) for digest in chosen)
        self._chosen_sums = frozenset(checksum for checksum, _ in self.chosen)
        return total

    def held_out(self, source: str | bytes) -> bool:
        """Whether examples with this source belong to validation."""
        content = _bytes(source)
        checksum = crc32(content)  # many times faster than the hash, and nearly always enough
        return checksum in self._chosen_sums and (checksum, self._hash(content)) in self.chosen


def _bytes(source: str | bytes) -> bytes:
    return source.encode("utf-8", "surrogatepass") if isinstance(source, str) else source
