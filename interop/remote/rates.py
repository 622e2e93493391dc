"""The rate limiter of a remote buffer: its counters are in the coordinator, and each client waits by itself."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from interop.buffers.rate_counts import Call, LimiterNumbers, RateCounts, refuse_endless
from interop.buffers.rate_limiter import RateLimiter, looks
from interop.remote.shards import Shards


class Admitted:
    """A call that was admitted, and counted in the coordinator.

    Attributes:
        items: how many items it writes or draws: set it to the true number once that is known.
    """

    def __init__(self, items: int) -> None:
        self.items = items


class RemoteLimiter(LimiterNumbers):
    """A client's view of the limiter of a remote buffer. It has the numbers of a `RateLimiter`.

    A call is counted when it is admitted, and no more if it fails: so the band holds for all clients together. This costs
    one round trip to the coordinator a call, and one more for each look of a wait. A client that is killed within a call may
    leave its items counted. If the coordinator is killed, the count begins in balance.

    Attributes:
        rule: the `fbuf.RateLimiter`.
        timeout: seconds that a call of this client waits; None for no limit. Can be set.
    """

    def __init__(self, limiter: RateLimiter, shards: Shards) -> None:
        self.rule = limiter.rule
        self.timeout = limiter.timeout
        self._shards = shards

    def counts(self) -> RateCounts:
        """What was written and drawn, by all clients."""
        found: RateCounts = self._shards.coordinate("rates")
        return found

    def stats(self) -> dict[str, int | float | bool]:
        """Plain numbers for logs, as by `RateLimiter.stats` but for the waits."""
        return self.counts().numbers(self.rule)

    @contextmanager
    def admitted(self, call: Call, items: int, shard: int = 0) -> Iterator[Admitted]:
        """Wait until a call of so many items is allowed, and count it. TimeoutError when the time is over.

        ValueError for a call of more items than the band has room for.
        """
        begun = time.monotonic()
        refused: RateCounts | None = None
        for waited in looks(begun, self.timeout, shortest=1e-3):  # noqa: B007
            try:
                refused = self._shards.coordinate("admit", call, items, shard)
            except LookupError:
                self._shards.begin_rates(None)
                refused = self._shards.coordinate("admit", call, items, shard)
            if refused is None:
                break
            refuse_endless(self.rule, *((items, 1) if call == "extend" else (1, items)))
        if refused is not None:
            other = "sample" if call == "extend" else "extend"
            raise TimeoutError(
                f"{call}() of {items} items has waited {waited:.3g} s for {other}() of another client: "
                f"{refused.account(self.rule, call, items)}. Nothing was {'written' if call == 'extend' else 'drawn'}"
            )
        made = Admitted(items)
        try:
            yield made
        except BaseException:
            made.items = 0
            raise
        finally:
            if made.items != items:
                self._shards.coordinate("correct", call, made.items - items, shard)

    def __rich_repr__(self) -> Iterator[tuple[str, object]]:
        yield "rule", self.rule
        yield "timeout", self.timeout
