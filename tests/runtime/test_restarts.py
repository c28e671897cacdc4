"""A process that has ended starts again, and later each time if it ends soon, or never becomes ready."""

from tidings.runtime.restarts import Restarts


def test_process_that_ends_soon_starts_later_each_time() -> None:
    now = 0.0
    restarts = Restarts(clock=lambda: now)
    assert restarts.delay == 0.0
    delays: list[float] = []
    for starting, ready in ((0.0, 0.0), (0.0, 0.0), (30.0, None), (5.0, 9.9), (0.0, 10.0), (0.0, 0.0)):
        restarts.start()
        assert restarts.delay is None
        now += starting
        if ready is not None:
            restarts.mark_ready()
            now += ready
        restarts.end()
        assert restarts.delay is not None
        delays.append(round(restarts.delay, 3))
        now += restarts.delay + 0.001  # seconds

    assert delays == [0.1, 0.2, 0.4, 0.8, 0.1, 0.2]
    assert restarts.delay == 0.0
