"""Delays double up to a limit, and start again after what has worked for a while."""

from tidings.runtime.backoff import Backoff


def test_delays_double_up_to_a_limit_and_start_again() -> None:
    backoff = Backoff(1.0, 5.0, stable=10.0)

    assert [backoff.fail() for _ in range(4)] == [1.0, 2.0, 4.0, 5.0]
    assert [backoff.fail(lasted) for lasted in (9.9, 10.0, 0.0)] == [5.0, 1.0, 2.0]
    backoff.reset()
    assert backoff.fail() == 1.0
    assert backoff.delay(10**6) == 5.0


def test_jitter_shortens_a_delay_by_up_to_half() -> None:
    chances = iter((0.0, 1.0))
    backoff = Backoff(1.0, 8.0, jitter=True, random=lambda: next(chances))

    assert [backoff.delay(1) for _ in range(2)] == [1.0, 2.0]
